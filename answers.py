"""Answers: where they stand in a text, what they say, and whether a rule can tell that they are right.

Rules come before the judge (judge.py): they are free, they do not change from one day to the next, and nobody talks them
round. A rule says right, wrong, or None where it cannot know.

Run as a script, this file is the process in which `math_equal` lets sympy loose; it imports the standard library alone.
"""

import json
import logging
import os
import queue
import re
import resource
import select
import signal
import string
import subprocess
import sys
import unicodedata
from collections import Counter
from fractions import Fraction

MAX_ANSWER_LEN = 1000  # characters; DeepEyes: an answer as long as that is no answer

# ---------------------------------------------------------------------------------------------------- where the answer is


def after_thinking(text: str) -> str:
    """What follows the last `</think>`."""
    return text.rpartition("</think>")[2]


def last_answer(text: str) -> str | None:
    """The text of the last closed `<answer>` block after the last `</think>`, stripped; None if there is none.

    >>> last_answer("<think>it is <answer>1</answer></think><answer> 7 </answer>")
    '7'
    """
    _, opened, block = after_thinking(text).rpartition("<answer>")
    answer, closed, _ = block.partition("</answer>")
    return answer.strip() if opened and closed else None


def boxes(text: str) -> list[str]:
    r"""The contents of the closed `\boxed{...}` after the last `</think>`, in order; of nested boxes the innermost.

    >>> boxes(r"so \boxed{1} or \boxed{\frac{1}{2}} or \boxed{")
    ['1', '\\frac{1}{2}']
    """
    found, tail = [], after_thinking(text)
    opened: list[int] = []  # for each brace that is open: where its content begins if it is a box's, else -1
    newest = -1  # where the newest complete box began
    for m in re.finditer(
        r"(\\(?:boxed|fbox)\s*)?\{|\}|\\.", tail, re.DOTALL
    ):  # one pass; `\\.` takes escaped braces away
        if m[0].endswith("{") and not m[0].startswith(r"\{"):
            opened.append(m.end() if m[1] else -1)
        elif m[0] == "}" and opened:
            start = opened.pop()
            if start > newest:  # a box, and none inside it
                found.append(tail[start : m.start()].strip())
                newest = start
    return found


def last_boxed(text: str) -> str | None:
    r"""The last of `boxes`; None if there is none.

    >>> last_boxed(r"\boxed{4}, no: \boxed{\boxed{5}}")
    '5'
    """
    found = boxes(text)
    return found[-1] if found else None


def format_error(text: str) -> bool:
    """DeepEyes' format rule: think, answer or image tags out of balance, or an answer of 1000 characters or more."""
    pairs = [("<think>", "</think>"), ("<answer>", "</answer>"), ("<|vision_start|>", "<|vision_end|>")]
    unbalanced = any(text.count(start) != text.count(end) for start, end in pairs)
    return unbalanced or len(last_answer(text) or "") >= MAX_ANSWER_LEN


# ---------------------------------------------------------------------------------------------------- what the answer says
_SUPERSCRIPTS = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_VULGAR = {ord(c): " " + unicodedata.normalize("NFKC", c).replace("⁄", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}


def clean(text: str) -> str:
    """`text` in one spelling: compatibility forms folded, invisible and control characters out, blanks single.

    >>> clean("  ７½\\u200b km²\\n")
    '7 1/2 km^2'
    """
    text = _SUPERSCRIPTS.sub(r"^\g<0>", text).translate(_VULGAR)  # NFKC alone makes 10² 102, and 3½ 31/2
    text = unicodedata.normalize("NFKC", text).replace("−", "-")
    text = "".join(c for c in text if c.isspace() or unicodedata.category(c)[0] != "C")
    return " ".join(text.split())


def plain(text: str) -> str:
    r"""`text` for comparing: cleaned, caseless, without what stands around it (quotes, `**`, `$`, `\\text{}`, full stops).

    >>> plain("**The Red car.**")
    'the red car'
    """
    text, before = clean(text), None
    while text != before:
        before = text
        text = text.strip(" \"'`*_“”‘’").rstrip(" .!。,;:")
        for pattern in (
            r"\$(.*)\$",
            r"\\\((.*)\\\)",
            r"\\\[(.*)\\\]",
            r"\\(?:text|textbf|mathrm|mathbf|boxed)\{([^{}]*)\}",
        ):
            if m := re.fullmatch(pattern, text):
                text = m[1]
    return text.casefold()


_LEAD = r"(?:(?:so |thus |hence )?(?:the )?(?:correct |right |final |best )?(?:answer|option|choice)(?: is)?:?\s*)?"
_CHOICE = re.compile(rf"{_LEAD}(?:\(([A-H])\)|([A-H])(?=[.:)]|$))[.:)]?\s*(.*)", re.IGNORECASE)
_CHOICES = re.compile(r"\(?[A-H]\)?[.:]?(?:(?:\s*[,;/&|]\s*|\s+(?:and|or)\s+|\s+)\(?[A-H]\)?[.:]?)+", re.IGNORECASE)


def choice(text: str) -> tuple[str, str] | None:
    """("B", the option's text) of an answer that begins with a choice letter A to H, None of any other.

    >>> choice("The answer is (b) a red car."), choice("A red car")
    (('B', 'a red car'), None)
    """
    text = clean(text).strip(" *`\"'$")
    if m := re.fullmatch(r"\\(?:text|textbf|mathrm|mathbf)\{(.*)\}", text):
        text = m[1]
    m = _CHOICE.fullmatch(text.strip())
    # A small letter is a choice only in brackets or on its own: "a: ..." may be anything.
    if not m or (m[2] and m[2].islower() and plain(m[3])):
        return None
    return (m[1] or m[2]).upper(), plain(m[3])


def several_choices(text: str) -> bool:
    """Whether `text` names two or more choice letters and nothing else: "A or B", "A, C", "(A)(B)"."""
    text = re.sub(rf"^{_LEAD}", "", clean(text).strip(" *`\"'$."), flags=re.IGNORECASE)
    return bool(_CHOICES.fullmatch(text.replace(")(", ") (")) or re.fullmatch(r"[A-H]{2,}", text))


_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNITS = {
    "percent": "%", "degree": "°", "degrees": "°", "deg": "°", "dollar": "$", "dollars": "$", "usd": "$", "euro": "€",
    "euros": "€", "meter": "m", "meters": "m", "metre": "m", "metres": "m", "centimeter": "cm", "centimeters": "cm",
    "centimetres": "cm", "millimeters": "mm", "millimetres": "mm", "kilometer": "km", "kilometers": "km", "kilometres": "km",
    "inches": "inch", "in": "inch", "feet": "ft", "foot": "ft", "mile": "mi", "miles": "mi", "gram": "g", "grams": "g",
    "kilogram": "kg", "kilograms": "kg", "kgs": "kg", "second": "s", "seconds": "s", "sec": "s", "minute": "min",
    "minutes": "min", "hour": "h", "hours": "h", "hr": "h", "hrs": "h", "day": "days", "year": "years",
}  # fmt: skip
_KNOWN_UNITS = {*_UNITS.values(), "£", "¥", "L", "ml", "mg", "N", "J", "W", "V", "K", "Hz", "m/s", "km/h", "mph"}
_KNOWN_UNITS |= {u + power for u in ("m", "cm", "mm", "km", "inch", "in", "ft", "mi") for power in ("^2", "^3")}
_NO_UNIT = re.compile(
    r"\b(?:or|and|not|than|more|less|to|but|if|is|are|was|maybe|minus|plus|times|by|per ?cent of|st|nd|rd|th)\b", re.I
)
_PLAIN_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?:[ ]\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)"
_TEN_TO = r"10\^\{?(?P<%s>[-+]?\d{1,3})\}?"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<currency>[$€£¥]?)\s*(?P<sign2>[-+]?)
    (?: (?:(?P<whole>\d+)\s+|(?P<whole2>\d+)(?=\\frac))?
        (?: (?P<top>\d+)\s*/\s*(?P<bottom>\d+)
          | \\frac\s*(?:\{{\s*(?P<top2>-?\d+)\s*\}}\s*\{{\s*(?P<bottom2>\d+)\s*\}}|(?P<top3>\d)(?P<bottom3>\d)) )
      | (?P<number>{_PLAIN_NUMBER}) (?:[eE](?P<exp>[-+]?\d{{1,3}}) | \s*(?:×|x|\*|\\times|\\cdot)\s*{_TEN_TO % "exp2"})?
      | {_TEN_TO % "exp3"} )
    (?P<blank>\s*)(?P<unit>(?:\\?%|°|[^\W\d_][^\d=<>+,;:?!(){{}}]{{0,30}}(?:\^\{{?[23]\}}?)?)?)""",
    re.VERBOSE,
)


def number(text: str) -> tuple[Fraction, str] | None:
    r"""(value, unit) of a text that is one number, None of any other text. The value is exact; the unit is "" or a word.

    Knows signs, thousands separators, decimals, powers of ten, fractions, mixed numbers, percent, currencies, scale words
    and LaTeX. "3,5" is no number: whether it is 3.5 or a list, nobody can say.

    >>> number("about 5"), number(r"$1{,}250.50\text{ cm}$"), number("-3 1/2")
    (None, (Fraction(2501, 2), 'cm'), (Fraction(-7, 2), ''))
    """
    if len(text) > 100:
        return None
    text = re.sub(r"[\u00a0\u2009\u202f]", " ", text).strip()
    text = re.sub(r"^(?:\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\])$", lambda m: m[1] or m[2] or m[3], text)
    text = clean(re.sub(r"\\[!,;: ]|~", " ", text.replace("{,}", ",").replace(r"\!", "")))
    text = re.sub(r"\\(?:text|mathrm|textrm|mbox|operatorname)\s*\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"\^\{?(?:\\circ|∘|º)\}?|\\degree|º", "°", text).replace(r"\$", "$")
    text = text.replace("dfrac", "frac").replace("tfrac", "frac").strip(" *`\"'").rstrip(" .")
    if text.casefold() in _WORDS:
        return Fraction(_WORDS.index(text.casefold())), ""
    m = _NUMBER.fullmatch(text)
    if not m or re.match(r"[-+]?0\d", text):  # 007 is a name
        return None
    top, bottom = m["top"] or m["top2"] or m["top3"], m["bottom"] or m["bottom2"] or m["bottom3"]
    if top:
        if int(bottom) == 0:
            return None
        value = Fraction(int(top), int(bottom)) + int(m["whole"] or m["whole2"] or 0)
    else:
        value = Fraction(re.sub("[, ]", "", m["number"] or "1")) * Fraction(10) ** int(
            m["exp"] or m["exp2"] or m["exp3"] or 0
        )
    if (m["sign"] == "-") != (m["sign2"] == "-"):
        value = -value
    unit = re.sub(r"[\\{}]", "", m["unit"]).strip(" .")
    if _NO_UNIT.search(unit) or (len(unit) == 1 and unit.isalpha() and not m["blank"]):
        return None  # "5 or more", "3rd", "2x"
    first, _, rest = unit.partition(" ")
    if first.casefold() in _SCALES:
        value, unit = value * _SCALES[first.casefold()], rest
    return value, _UNITS.get(unit.casefold(), unit) or m["currency"]


def same_number(answer: str, truth: str) -> bool | None:
    """Whether two texts are the same number; None if one is no number, or their units differ and nobody knows better.

    A unit may be left out. So may a percent sign, except below 1: 0.5 means 50 %. Integers must be equal; other numbers
    may differ by a millionth, since 1/3 is written 0.333333.
    """
    a, b = number(answer), number(truth)
    if a is None or b is None:
        return None
    (a, unit), (b, true_unit) = a, b
    if (unit == "%") != (true_unit == "%") and not (unit and true_unit):
        a, b = (a, b) if unit == "%" else (b, a)  # a is the one with the sign
        return _close(a / 100, b) or (abs(a) > 1 and _close(a, b))
    if unit and true_unit and unit != true_unit:
        return None
    return _close(a, b)


def _close(a: Fraction, b: Fraction, tolerance: Fraction = Fraction(1, 10**6)) -> bool:
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


_YES_NO = {"yes": True, "true": True, "no": False, "false": False}


def rule_verdict(answer: str | None, truth: str) -> bool | None:
    """Right, wrong, or None where only a judge can tell: whether a short answer means the truth.

    Rules decide equal texts, choice letters, numbers, yes and no. Two decimals within 5 % of one another, different units
    and all other differing texts are left to the judge.
    """
    if answer is None or not answer.strip() or len(answer) >= MAX_ANSWER_LEN:
        return False
    if plain(answer) == plain(truth) and (plain(truth) or answer.strip() == truth.strip()):
        return True
    ours, theirs = choice(answer), choice(truth)
    if theirs:
        letter, option = theirs
        if several_choices(answer):
            return False
        if ours:
            if ours[0] != letter:
                return False
            return True if not option or not ours[1] or ours[1] == option else None  # right letter, other text
        return True if option and plain(answer) == option else None
    if ours and ours[1] and ours[1] == plain(truth):
        return True
    same = same_number(answer, truth)
    if same is False:
        a, b = number(answer)[0], number(truth)[0]
        near = a.denominator * b.denominator != 1 and _close(a, b, Fraction(1, 20))
        return None if near else False
    if same is None and plain(answer) in _YES_NO and plain(truth) in _YES_NO:
        return _YES_NO[plain(answer)] == _YES_NO[plain(truth)]
    return same


# ---------------------------------------------------------------------------------------------------- math
class MathChecker:
    """Compares math answers by math-verify in processes of their own, each answer under a limit of processor time.

    sympy may run for hours or eat all memory on a short text that the policy is free to write, and math-verify's own limit
    is a signal, which only a main thread can have. So this file runs as a script, started when first needed (neither
    forked, vLLM's threads are here, nor spawned by multiprocessing, which would import the main script again). It ends
    itself after `limit` seconds of processor time (on a machine that does other things a right answer must not become a
    wrong one), and is killed after `patience` times as many by the clock. Thread-safe: at most `num` processes, a thread
    waits while all are busy.
    """

    def __init__(self, num: int = 2, limit: float = 3.0, patience: int = 20, memory_mb: int = 2048):
        self.limit, self.patience, self.memory_mb = limit, patience, memory_mb
        self.idle: queue.LifoQueue = queue.LifoQueue()  # processes, or None for one that may be started
        for _ in range(num):
            self.idle.put(None)

    def equal(self, answer: str, truth: str) -> bool | None:
        """None: no decision within the limit. Raises RuntimeError if the process does not start."""
        worker = self.idle.get()
        try:
            if worker is None or worker.poll() is not None:
                worker = self._start()
            worker.stdin.write(json.dumps([truth, answer]).encode() + b"\n")
            worker.stdin.flush()
            reply = self._read(worker, self.limit * self.patience)
            if reply is None:
                worker.kill()
                worker.wait()
                worker = None
            return reply
        except BrokenPipeError:
            worker = None
            return None
        finally:
            self.idle.put(worker)

    def _start(self) -> subprocess.Popen:
        worker = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(self.memory_mb), str(self.limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for the run, which ends this one by its pipe
        )
        if self._read(worker, 120.0) is not True:
            worker.kill()
            raise RuntimeError("the math checker does not start; does `python -c 'import math_verify'` work?")
        return worker

    @staticmethod
    def _read(worker: subprocess.Popen, limit: float) -> bool | None:
        poll = select.poll()
        poll.register(worker.stdout, select.POLLIN)
        line = worker.stdout.readline() if poll.poll(limit * 1000) else b""
        return json.loads(line) if line else None


def _serve_math(memory_mb: int, limit: float) -> None:
    """The process: [truth, answer] a line in, true or false a line out, until the pipe closes."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no reply
    logging.disable(logging.WARNING)  # math-verify warns that its own time limit is off
    from math_verify import parse, verify

    print("true", file=replies, flush=True)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, limit)  # SIGPROF, unhandled, ends the process wherever it is
        try:
            truth, answer = (parse(f"${text}$", parsing_timeout=None) for text in json.loads(line))
            equal = bool(verify(truth, answer, timeout_seconds=None))
        except Exception:  # sympy raises anything; memory is one of them
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(equal), file=replies, flush=True)


MATH = MathChecker()


def math_equal(answer: str | None, truth: str) -> bool | None:
    r"""Whether a math answer (the content of a box) equals the truth; None if that took too long to find out.

    Texts and numbers first; what they leave open is math-verify's (equal expressions, sets, intervals, equations).

    >>> math_equal(r"\dfrac12", "0.5"), math_equal("3", "4")
    (True, False)
    """
    if answer is None or not answer.strip() or len(answer) >= MAX_ANSWER_LEN:
        return False
    if clean(answer) == clean(truth):
        return True
    if plain(answer) == plain(truth):  # case does not matter to words, but x is not X, nor \\Delta \\delta
        return (
            bool(re.fullmatch("[a-z ]{3,}", plain(truth)))
            or MATH.equal(answer, truth)
            and _cased(answer) == _cased(truth)
        )
    if all((n := number(text)) and (not n[1] or n[1] in _KNOWN_UNITS) for text in (answer, truth)):
        return bool(same_number(answer, truth))  # 5 cm is not 5 m; 2 xy is no number with a unit
    answer, truth = (re.sub(r"^\s*(?:\$|\\\(|\\\[)|(?:\$|\\\)|\\\])\s*$", "", text).strip() for text in (answer, truth))
    if "=" in answer and "=" not in truth:
        # "x = 5" answers 5; "|x| = 5" does not, nor does "x^2 = 5".
        name = re.sub(r"\\(?:text|mathrm|angle|triangle|overline)|[\s{}]", "", answer.partition("=")[0])
        if re.search(r"[a-zA-Z]", name) and not re.fullmatch(r"\\?[a-zA-Z][\w']*(?:\([\w,.+-]*\))?", name):
            return False
    return MATH.equal(answer, truth)


def _cased(text: str) -> str:
    """The letters and digits of a math text, their case kept."""
    return re.sub(r"\\(?:text|mathrm|left|right)\b|\W", "", text)


# ---------------------------------------------------------------------------------------------------- search answers
def _tokens(text: str) -> list[str]:
    """SQuAD's normalisation: lower case, no punctuation, no articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def exact_match(answer: str, truth: str) -> float:
    """1.0 if both are the same words in the sense of SQuAD's evaluation, else 0.0."""
    return float(_tokens(answer) == _tokens(truth) != [])


def token_f1(answer: str, truth: str) -> float:
    """F1 of the words of both, as SQuAD's evaluation; yes and no must be equal, as HotpotQA's.

    >>> token_f1("the Eiffel Tower in Paris", "Eiffel Tower")
    0.6666666666666666
    """
    a, b = _tokens(answer), _tokens(truth)
    if a != b and (a in (["yes"], ["no"]) or b in (["yes"], ["no"])):
        return 0.0
    common = (Counter(a) & Counter(b)).total()
    return 2 * common / (len(a) + len(b)) if common else 0.0


if __name__ == "__main__":
    _serve_math(int(sys.argv[1]), float(sys.argv[2]))
