"""A scripted engine: says the given texts, one per call, and remembers what it was asked."""

import asyncio

from engine import Generation


class ScriptedEngine:
    """`texts` are said in order, each closed by the end-of-turn token unless it is a (text, "length") pair.

    The k-th token of all that it says has logprob -k / 100, so that tests can find each one again.
    """

    leads = True

    def __init__(self, codec, texts):
        self.codec, self.texts = codec, list(texts)
        self.asked = []  # (engine ids, view uuids, max_tokens) of each call
        self.said = 0

    async def generate(self, ids, views, *, max_tokens, temperature, seed):
        self.asked.append((list(ids), [v.uuid for v in views], max_tokens))
        await asyncio.sleep(0)
        entry = self.texts.pop(0)
        text, stopped = (entry, True) if isinstance(entry, str) else (entry[0], False)
        out = self.codec.encode(text, tags=True) + ([self.codec.im_end] if stopped else [])
        out, stopped = (out, stopped) if len(out) <= max_tokens else (out[:max_tokens], False)
        logprobs = [-(self.said + k) / 100 for k in range(1, len(out) + 1)]
        self.said += len(out)
        return Generation(self.codec.expand(ids, [v.image.size for v in views]), out, logprobs, stopped, version=7)

    async def check(self):
        pass
