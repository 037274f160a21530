"""The page in a real Chromium, on a desktop, on a phone and on paper; skipped without one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from goldfish.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

LOOK = """
const look = (page) => {
const found = {};
const name = (e) => e.tagName + "." + e.className + ": " + e.textContent.trim().slice(0, 40);
found.width = [page.documentElement.scrollWidth, page.documentElement.clientWidth];
found.figures = [...page.querySelectorAll("figure")].map((figure) => {
  const box = figure.querySelector("svg").getBoundingClientRect();
  return [figure.getAttribute("aria-label"), box.width, box.height];
});
found.wide = [...page.querySelectorAll("body *")]
  .filter((e) => !e.closest("svg") && !e.closest(".scroll") && e.getClientRects().length)
  .filter((e) => e.getBoundingClientRect().right > page.documentElement.clientWidth + 1).map(name);
found.tables = [...page.querySelectorAll(".scroll")]
  .filter((e) => e.scrollWidth > e.clientWidth + 1).length;
found.cues = [...page.querySelectorAll(".scroll")]
  .every((e) => getComputedStyle(e).backgroundImage.includes("gradient"));
found.broken = [];
const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), range = page.createRange();
for (let node; (node = walk.nextNode()); ) {
  if (node.parentElement.closest("svg, style")) continue;
  for (const word of node.data.matchAll(/[\\p{L}\\d]+/gu)) {
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    const tops = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
    if (tops.size > 1) found.broken.push(word[0]);
  }
}
found.pictures = [...page.querySelectorAll("article img")]
  .map((e) => getComputedStyle(e).objectFit);
return found;
};
const all = [...document.querySelectorAll("iframe")].map((e) => look(e.contentDocument));
document.body.textContent = JSON.stringify(all);
"""


PAPER = 688
"""Pixels of a sheet of A4 between its margins of 14 mm."""


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, make_grown: Any, make_audit: Any, write_to: Any
) -> dict[int, dict[str, Any]]:
    """Return, by width, what Chromium finds in the page of ten methods with an audit.

    Each width is a frame of one window, which itself cannot be as narrow as a phone.
    """
    made = make_grown() | {"test_images": {"accuracy": 360, "backdoor": 324}}
    folder = write_to(tmp_path_factory.mktemp("browser"), made)
    (folder / "audit.json").write_text(json.dumps(make_audit(list(made["methods"]))))
    samples = json.loads((folder / "samples.json").read_text())
    samples["class_names"][7:9] = ["greater Swiss mountain dog", "aircraft carrier, flattop"]
    (folder / "samples.json").write_text(json.dumps(samples))
    page = write_report(folder).read_text()
    pages = {1280: page, 390: page, PAPER: page.replace("@media print", "@media all")}
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(text)}">'
        "</iframe>"
        for width, text in pages.items()
    )
    script = f"window.onload = () => {{ {LOOK} }}"
    (folder / "frames.html").write_text(
        f"<!doctype html><meta charset=utf-8><body>{frames}<script>{script}</script>"
    )
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--dump-dom"]
    command += ["--hide-scrollbars", (folder / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    body = re.search(r"<body>(.*?)</body>", done.stdout, re.DOTALL)
    assert body is not None
    return dict(zip(pages, json.loads(html.unescape(body[1])), strict=True))


@pytest.mark.parametrize("width", [1280, 390, PAPER])
def test_nothing_overflows_and_no_word_is_broken(
    found: dict[int, dict[str, Any]], width: int
) -> None:
    """Tables may be wider than a phone, and then say so; on paper there is nothing to scroll."""
    here = found[width]
    assert here["width"] == [width, width]
    assert here["wide"] == []
    assert here["broken"] == []
    assert (here["tables"] > 0) is (width == 390)
    assert here["cues"] is (width != PAPER)


def test_every_figure_is_there(found: dict[int, dict[str, Any]]) -> None:
    for width, here in found.items():
        titles = [title for title, _, _ in here["figures"]]
        assert len(titles) == 4 + 4
        for begin in ("Margins on removed", "Attack", "Relearning", "Harm", "Accuracy on", "Back"):
            assert any(title.startswith(begin) for title in titles)
        assert all(0.4 * min(width, 1000) < w and h > 100 for _, w, h in here["figures"])


def test_pictures_keep_their_shape(found: dict[int, dict[str, Any]]) -> None:
    assert found[1280]["pictures"] == ["contain"] * 8
