r"""Answers: a table of texts with the verdict that a careful person gives, and what a hostile text may cost."""

import os
import signal
import threading
import time

import pytest

from answers import (
    MATH,
    MathChecker,
    exact_match,
    format_error,
    last_answer,
    last_boxed,
    math_equal,
    number,
    rule_verdict,
    several_choices,
    token_f1,
)

ONE_MB = 1 << 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>7</answer>", "7"),
        ("<answer>\n 7 \n</answer>", "7"),
        ("<think>a</think><answer>7</answer>", "7"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("<think>is it <answer>1</answer>?</think> <answer>2</answer>", "2"),
        ("<think>is it <answer>1</answer>?</think> I do not know", None),
        ("<think>a</think><answer>1</answer><think>b</think><answer>2</answer>", "2"),
        ("<think>a</think><answer>1</answer><think>b</think>", None),
        ("", None),
        ("7", None),
        ("<answer>7", None),
        ("7</answer>", None),
        ("</answer>7<answer>", None),
        ("<answer>1</answer><answer>2", None),  # cut off: the first was taken back
        ("<answer></answer>", ""),
        ("<answer>  </answer>", ""),
        ("<answer><answer>7</answer></answer>", "7"),
        ("<ANSWER>7</ANSWER>", None),
        ("<answer>红色 🚗</answer><|im_end|>", "红色 🚗"),
        ("<answer>a < b</answer>", "a < b"),
        ("x" * ONE_MB + "<answer>7</answer>", "7"),
        ("<answer>" * 100_000 + "7</answer>", "7"),
    ],
)
def test_last_answer(text, expected):
    assert last_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"so $\boxed{ 5 }$.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\frac{\sqrt{3}}{2^{10}}} cm", r"\frac{\sqrt{3}}{2^{10}}"),
        (r"\boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{a } b}", r"\text{a } b"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> none", None),
        (r"\boxed{1} and \boxed{2", "1"),  # the second never closed
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{}", ""),
        (r"boxed{5}", None),
        (r"\boxed 5", None),
        ("", None),
        ("}}}{{{", None),
        (r"}} \boxed{5}", "5"),
        (r"\boxed{东}", "东"),
        ("x" * ONE_MB + r"\boxed{5}", "5"),
        (r"\boxed{" * 100_000 + "5" + "}" * 100_000, "5"),
        (r"\boxed{" * 100_000, None),
        (r"\boxed{5}" + "{" * ONE_MB, "5"),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("<think>a</think><answer>7</answer>", False),
        ("<think>a</think><tool_call>{}</tool_call><think>b</think><answer>7</answer>", False),
        ("7", False),
        ("<think>a<answer>7</answer>", True),
        ("<think>a</think></think><answer>7</answer>", True),
        ("<think>a</think><answer>7", True),
        ("<|vision_start|><answer>7</answer>", True),
        ("<answer>" + "7" * 999 + "</answer>", False),
        ("<answer>" + "7" * 1000 + "</answer>", True),
    ],
)
def test_format_error(text, bad):
    assert format_error(text) is bad


RIGHT, WRONG, ASK = True, False, None  # ASK: only a judge can tell


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        # equal texts
        ("red", "red", RIGHT),
        ("Red.", "red", RIGHT),
        ("  the RED car ", "The red car", RIGHT),
        ('"STOP"', "stop", RIGHT),
        ("**left**", "left", RIGHT),
        (r"$\text{left}$", "left", RIGHT),
        ("café", "café", RIGHT),  # composed and decomposed
        ("ｒｅｄ", "red", RIGHT),  # full-width
        ("re\u200bd", "red", RIGHT),
        ("红色", "红色", RIGHT),
        ("红色。", "红色", RIGHT),
        ("STRASSE", "straße", RIGHT),
        (":", ":", RIGHT),  # what is on the sign? a colon
        ("!", ":", ASK),
        ("Thought process:", "Thought process:", RIGHT),
        # other texts
        ("crimson", "red", ASK),
        ("a red car", "red car", ASK),
        ("blue", "red", ASK),
        ("red, blue", "red", ASK),
        ("The car is red", "red", ASK),
        ("", "red", WRONG),
        ("   ", "red", WRONG),
        (None, "red", WRONG),
        ("red" * 400, "red", WRONG),
        ("r" * 1000, "r" * 1000, WRONG),  # 1000 characters are no answer, whatever they say
        ("r" * 999, "r" * 999, RIGHT),
        # choices
        ("B", "B", RIGHT),
        ("b", "B", RIGHT),
        ("(B)", "B", RIGHT),
        ("B.", "B", RIGHT),
        ("B)", "B", RIGHT),
        ("(b) red", "B", RIGHT),
        ("B. red", "B", RIGHT),
        ("B: red", "B", RIGHT),
        ("Option B", "B", RIGHT),
        ("The answer is B.", "B", RIGHT),
        ("The correct option is (B)", "B", RIGHT),
        ("Answer: B", "B", RIGHT),
        ("**B**", "B", RIGHT),
        (r"\text{B}", "B", RIGHT),
        ("$B$", "B", RIGHT),
        ("A", "B", WRONG),
        ("(A)", "B", WRONG),
        ("A. red", "B. red", WRONG),
        ("B. red", "B. red", RIGHT),
        ("B", "B. red", RIGHT),
        ("red", "B. red", RIGHT),
        ("B. red", "red", RIGHT),
        ("B. blue", "B. red", ASK),  # the letter says one thing, the text another
        ("red", "B", ASK),  # the option's text: only the question knows
        ("A dog", "A", ASK),  # an article, no letter
        ("a dog", "a dog", RIGHT),
        ("A or B", "B", WRONG),
        ("A, B", "B", WRONG),
        ("A and B", "B", WRONG),
        ("A/B", "B", WRONG),
        ("(A)(B)", "B", WRONG),
        ("A B C D", "B", WRONG),
        ("ABCD", "B", WRONG),
        ("The answer is A or B.", "B", WRONG),
        ("A; B; C", "B", WRONG),
        # numbers
        ("5", "5", RIGHT),
        ("5.0", "5", RIGHT),
        ("007", "7", ASK),  # a number or a name?
        ("0.50", ".5", RIGHT),
        ("five", "5", RIGHT),
        ("Five", "five", RIGHT),
        ("two", "3", WRONG),
        ("6", "5", WRONG),
        ("-5", "5", WRONG),
        ("−5", "-5", RIGHT),  # U+2212
        ("1,234", "1234", RIGHT),
        ("1 234 567", "1,234,567", RIGHT),
        ("1\u202f234", "1234", RIGHT),
        ("12,34", "1234", ASK),  # no thousands separator; perhaps a decimal comma
        ("1.234", "1234", WRONG),
        ("0.5", "1/2", RIGHT),
        ("½", "0.5", RIGHT),
        ("3½", "3.5", RIGHT),
        ("3 1/2", "3.5", RIGHT),
        ("1/3", "0.333333", RIGHT),
        ("1/0", "1", ASK),
        ("10²", "100", RIGHT),
        ("1.5 × 10¹²", "1.5e12", RIGHT),
        ("10⁻²", "0.01", RIGHT),
        ("10²", "102", WRONG),  # a square, not a digit
        ("50%", "50 %", RIGHT),
        ("50%", "0.5", RIGHT),
        ("50", "50%", RIGHT),
        ("50 percent", "50%", RIGHT),
        ("0.5", "0.5%", ASK),
        ("0.5%", "50%", WRONG),
        ("$5", "5 dollars", RIGHT),
        ("$1,200.50", "1200.5", RIGHT),
        ("€5", "$5", ASK),
        ("5 cm", "5 cm", RIGHT),
        ("5cm", "5 centimeters", RIGHT),
        ("5", "5 cm", RIGHT),
        ("5 cm", "5 m", ASK),
        ("2 km", "2000 m", ASK),
        ("6 cm", "5 cm", WRONG),
        ("5 apples", "5", RIGHT),
        ("3 people", "4", WRONG),
        ("1.5 million", "1500000", RIGHT),
        ("1.5e6", "1,500,000", RIGHT),
        (r"1.5\times10^{6}", "1500000", RIGHT),
        (r"\frac{3}{4}", "0.75", RIGHT),
        ("3.1", "3.14", ASK),  # rounded: the judge's business
        ("31", "32", WRONG),  # whole numbers are not rounded
        ("1998", "1999", WRONG),
        ("3.9", "3.14", WRONG),
        ("5 or more", "5", ASK),
        ("5 or 6", "5", ASK),
        ("4, 5", "5", ASK),
        ("3rd", "3", ASK),
        ("about 5", "5", ASK),
        ("16:30", "16:30", RIGHT),
        ("16:30", "4:30 pm", ASK),
        ("٣", "3", RIGHT),  # an Arabic-Indic digit
        ("9" * 90, "9" * 90, RIGHT),
        ("9" * 900, "1", ASK),
        # yes and no
        ("Yes", "yes", RIGHT),
        ("no", "yes", WRONG),
        ("true", "yes", RIGHT),
        ("False", "True", WRONG),
        ("yes, it is", "yes", ASK),
        ("yes and no", "yes", ASK),
        ("1", "yes", ASK),
    ],
)
def test_rule_verdict(answer, truth, expected):
    assert rule_verdict(answer, truth) is expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("5", "5", True),
        ("5", "6", False),
        ("", "5", False),
        (None, "5", False),
        (r"\frac12", "0.5", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        ("0.333", r"\frac{1}{3}", False),
        (r"x^2+2x+1", "(x+1)^2", True),
        (r"x^2+2x+2", "(x+1)^2", False),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"\sqrt{13}", r"\sqrt{12}", False),
        ("x=5", "5", True),
        ("5", "x=5", True),
        ("f(2)=5", "5", True),
        ("|x|=5", "5", False),
        ("x^2=5", "5", False),
        ("(1,2)", "(1, 2)", True),
        ("(2,1)", "(1,2)", False),
        (r"\{2,1\}", r"\{1,2\}", True),
        ("3,2,1", "1,2,3", True),
        ("[1,2)", "[1,2)", True),
        ("(1,2]", "[1,2)", False),
        (r"(-\infty,3]", r"x\in(-\infty,3]", True),
        (r"x<3", r"x > 3", False),
        (r"\pi", "3.14", False),
        (r"4\pi", r"4\pi", True),
        (r"\text{Monday}", "monday", True),
        (r"\text{Monday}", r"\text{Tuesday}", False),
        ("x", "X", False),
        (r"\Delta", r"\delta", False),
        (r"$\Delta$", r"\Delta", True),
        ("90^\\circ", "90", True),
        (r"90^{\circ}", "90 degrees", True),
        (r"5\text{ cm}", "5", True),
        (r"5\text{ cm}", r"5\text{ m}", False),
        (r"50\%", "50", True),
        (r"\$5.00", "5", True),
        ("12{,}345", "12345", True),
        (r"10,\!000", "10000", True),
        (r"1.5\times10^3", "1500", True),
        ("1.5e3", "1500", True),
        ("3\\frac12", "3.5", True),
        ("2x", "2", False),
        ("2xy", "2", False),
        ("2i", "2", False),
        ("3+4i", "4i+3", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
        (r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", False),
        (r"\text{(C)}", "C", True),
        (r"\infty", r"-\infty", False),
        (r"\binom{5}{2}", "10", True),
        (r"\log_2 8", "3", True),
        ("y=2x+1", "2x-y+1=0", True),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}", True),
        ("$5$", "5", True),
        (r"\(5\)", "5", True),
        ("5 or 6", "5", False),
        ("5, 6", "5", False),
        (r"\pm 5", "5", False),
        ("1, 2, 3, 4, 5", "5", False),
        (r"(-\infty,\infty)", "5", False),
        ("0/0", "5", False),
        ("nan", "5", False),
        ("}{", "5", False),
        ("\\", "5", False),
        ("$$", "5", False),
        ("五", "5", False),
        ("5" * 1000, "5", False),
        ("x" * ONE_MB, "5", False),
    ],
)
def test_math_equal(answer, truth, expected):
    assert math_equal(answer, truth) is expected


@pytest.mark.parametrize(
    ("answer", "truth", "em", "f1"),
    [
        ("Paris", "paris", 1, 1),
        ("The Eiffel Tower!", "Eiffel tower", 1, 1),
        ("Paris, France", "Paris", 0, 2 / 3),
        ("London", "Paris", 0, 0),
        ("", "Paris", 0, 0),
        ("...", "Paris", 0, 0),
        ("the", "a", 0, 0),  # nothing is left of either
        ("yes", "yes", 1, 1),
        ("yes or no", "yes", 0, 0),
        ("no", "no way", 0, 0),
        ("a b c d", "c d e f", 0, 4 / 7),  # a is an article: 2 common of 3 and 4
        ("red red red", "red", 0, 0.5),
        ("1,000", "1000", 1, 1),
    ],
)
def test_words_of_search_answers(answer, truth, em, f1):
    assert exact_match(answer, truth) == em
    assert token_f1(answer, truth) == pytest.approx(f1)


HUGE = ["a" * ONE_MB, "$" * ONE_MB, "{" * ONE_MB, "\u200b" * ONE_MB, " A" * 500_000, "1," * 500_000, "((" * 400_000]
HUGE += ["<answer>" * 99_999, "\\boxed{" * 99_999 + "}" * 99_999, "𝟝" * 200_000]


@pytest.mark.parametrize("text", HUGE, ids=lambda text: text[:8])
def test_a_megabyte_takes_no_time(text):
    start = time.thread_time()
    assert rule_verdict(text, "5") is False
    assert math_equal(text, "5") is False
    last_answer(text), last_boxed(text), format_error(text), number(text)
    assert rule_verdict(text[:999], "B") is not True
    several_choices(text[:999])
    assert time.thread_time() - start < 3  # a quarter of a second here


RUNAWAY = ["9^{9^{9^{9}}}-9^{9^{9^{8}}}", "(x+1)^{99999}", "100000000!", r"\int_0^1 x^{x^{x^x}} dx"]


def test_runaway_math_is_killed_and_the_next_one_works():
    """From a thread, as the rollout does it; math-verify's own time limit would raise there."""
    checker, results = MathChecker(num=1, limit=0.5), []

    def check():
        for text in RUNAWAY:
            results.append((checker.equal(text, "5"), checker.equal(r"\frac{2}{4}", "0.5")))

    thread = threading.Thread(target=check)
    thread.start()
    thread.join(120)
    assert results == [(None, True)] * len(RUNAWAY)


def test_a_math_process_that_hangs_without_working_is_killed_by_the_clock():
    checker = MathChecker(num=1, limit=0.5, patience=4)
    assert checker.equal("5", "5") is True
    process = checker.idle.get_nowait()
    os.kill(process.pid, signal.SIGSTOP)
    checker.idle.put(process)
    assert checker.equal("5", "5") is None and process.returncode == -signal.SIGKILL
    assert checker.equal("5", "5") is True


def test_a_math_process_that_dies_is_replaced():
    checker = MathChecker(num=1)
    assert checker.equal("5", "5") is True
    process = checker.idle.get_nowait()
    os.kill(process.pid, 9)
    process.wait()
    checker.idle.put(process)
    assert checker.equal(r"\sqrt{4}", "2") is True


def test_math_from_many_threads():
    results = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(math_equal(f"x+{i}", f"{i}+x") is True)) for i in range(16)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [True] * 16
    assert MATH.idle.qsize() == 2, "two processes did it"
