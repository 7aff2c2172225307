"""The web page in headless Chromium, which a script uses as a person would."""

import json
import os
import re
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest

from inference import generate

BROWSER = shutil.which("chromium")
QUESTION = "w3 w4 w5 w6 w7 w8 w3 w4"
USE = """(async (question, compares, tokens) => {
  const until = async condition => { while (!condition()) await new Promise(done => setTimeout(done, 20)); };
  await until(() => model);
  $("tokens").value = tokens;
  $("compare").checked = compares;
  $("question").value = question;
  $("form").requestSubmit();
  await until(() => !running);
  const steps = document.querySelectorAll(".answer:first-child .text > span");
  [...steps].reverse().find(step => step.querySelector(".d"))?.click();
  return document.documentElement.outerHTML;
})"""


class Browser:
    """Chromium, which takes commands of its DevTools from a pipe: JSON messages that end with a null byte.

    Args:
        folder: Folder for its files.
    """

    def __init__(self, folder):
        commands, self._write = os.pipe()
        self._read, replies = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
        line = [BROWSER, *options, "--remote-debugging-pipe", "--window-size=1280,900"]
        shell = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{replies}', "bash", *line]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(shell, pass_fds=(commands, replies), **quiet)
        os.close(commands)
        os.close(replies)
        self._pending, self._number = b"", 0

    def __call__(self, method, session=None, **params):
        """Call a method and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            while b"\0" not in self._pending:
                block = os.read(self._read, 1 << 16)
                assert block, "the browser has ended"
                self._pending += block
            line, _, self._pending = self._pending.partition(b"\0")
            if (reply := json.loads(line)).get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]

    def open(self, url):
        """Open a page and return its session."""
        target = self("Target.createTarget", url=url)["targetId"]
        return self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def evaluate(self, page, expression):
        """Evaluate an expression in a page, wait for its promise, and return its value."""
        options = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        result = self("Runtime.evaluate", page, **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")


@contextmanager
def browsing(folder):
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.process.terminate()
        browser.process.wait(30)


def use(browser, page, question, compares=False, tokens=40):
    """Ask a question on the page, click a step of the answer, and return the document."""
    while not browser.evaluate(page, "document.readyState === 'complete' && location.href.startsWith('http')"):
        time.sleep(0.02)
    arguments = json.dumps([question, compares, tokens])
    return browser.evaluate(page, f"{USE}(...{arguments})")


def text_of(html):
    return re.sub(r"<[^>]*>", "", html)


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_a_browser_shows_the_steps_of_both_answers_and_the_tree_of_one(long_base, serve_base, tmp_path):
    expected = generate(long_base, QUESTION, "anpd:order=2", max_new_tokens=40)[0]
    with serve_base(long_base) as running, browsing(tmp_path) as browser:
        page = browser.open(running.url)
        html = use(browser, page, QUESTION, compares=True)
        hostile = use(browser, page, "<img src=x onerror=alert(1)> w3")
    texts = re.findall(r'<div class="text">(.*?)</div>', html, re.DOTALL)
    assert [text_of(text) for text in texts] == [expected.text] * 2
    spans = re.findall(r'<span class="s\d[^"]*"[^>]*>(.*?</span>)</span>', texts[0])
    assert len(spans) == len(expected.steps), "one stretch for each step"
    assert sum('class="d"' in span for span in spans) == sum(step.accepted > 0 for step in expected.steps)
    assert 'class="d"' not in texts[1], "the base alone drafts nothing"
    figures = re.findall(r'<p class="figures">(.*?)</p>', html)
    assert f"acceptance length {expected.acceptance_length:.2f}" in figures[0] and "the same text" in figures[0]
    tree = re.search(r'<div id="tree">(.*?)</div>', html, re.DOTALL)[1]
    clicked = [step for step in expected.steps if step.accepted][-1]
    assert tree.count("node accepted") == clicked.accepted
    assert tree.count('class="node') == clicked.fed_candidates
    assert "&lt;img src=x onerror=alert(1)&gt; w3" in hostile and "<img" not in hostile
