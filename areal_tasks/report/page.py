"""The page: a template, a style sheet, a script and the data in one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from areal_tasks.report.data import Report, make_report
from areal_tasks.store.backend import Store

#: The modules of the script; each uses only earlier ones.
MODULES: Final = (
    "dom.js",
    "format.js",
    "data.js",
    "scales.js",
    "chart.js",
    "stack.js",
    "curves.js",
    "facts.js",
    "cost.js",
    "time.js",
    "tokens.js",
    "detail.js",
    "filters.js",
    "rollouts.js",
    "main.js",
)

MAX_BYTES: Final = 5_000_000
SAMPLES: Final = 400

_IMPORT: Final = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)
_SLOT: Final = re.compile(r"\{\{(\w+)\}\}")


def make_page(
    store: Store, names: Sequence[str], samples: int = SAMPLES, max_bytes: int = MAX_BYTES
) -> tuple[str, Report]:
    """The HTML of the report on these runs, at most `max_bytes` long, and its data. UserError: see `make_report`."""
    frame = len(render(" · ".join(names), "").encode())
    report = make_report(store, names, samples, max_bytes - frame)
    return render(" · ".join(names), report.text), report


def render(title: str, data: str) -> str:
    """The whole page around `data`, which is JSON without markup (`to_json`)."""
    script, style = bundle(), _asset("style.css")
    slots = {
        "title": html.escape(title),
        "policy": policy(script, style),
        "style": style,
        "script": script,
        "data": data,
    }
    return _SLOT.sub(lambda slot: slots[slot[1]], _asset("page.html"))


def bundle() -> str:
    """The modules as one script: without imports and exports, in a scope of its own."""
    bodies = [_EXPORT.sub("", _IMPORT.sub("", _asset(name))) for name in MODULES]
    return '"use strict";\n(() => {\n' + "\n".join(bodies) + "})();\n"


def policy(script: str, style: str) -> str:
    """A Content-Security-Policy that allows this script and this style sheet, and nothing else: no network."""
    return (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _asset(name: str) -> str:
    return files("areal_tasks.report").joinpath("assets", name).read_text(encoding="utf-8")
