"""Half a point for an answer in <answer> tags, the other half when it is right."""

import re

from areal_tasks.rewards.protocol import Verdict


def tagged(prompt: str, completion: str, answer: str, ignore_case: bool = True) -> Verdict:
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    if not found:
        return Verdict(0.0, "unparseable", detail="no <answer>…</answer>")
    last, wanted = found[-1].strip(), answer.strip()
    if ignore_case:
        last, wanted = last.lower(), wanted.lower()
    if last == wanted:
        return Verdict(1.0, "correct", parsed=last)
    return Verdict(0.5, "incorrect", parsed=last)
