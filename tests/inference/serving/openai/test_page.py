"""The web page in headless Chromium. A script from the same server uses it as a person would."""

import re
import shutil
import subprocess
import urllib.request

import pytest
from fastapi import Response

from inference import generate
from inference.serving.openai.app import HEADERS

BROWSER = shutil.which("chromium")
QUESTION = "w3 w4 w5 w6 w7 w8 w3 w4"
USE = """
const wait = async condition => { while (!condition()) await new Promise(done => setTimeout(done, 20)); };
(async () => {
  await wait(() => model);
  $("tokens").value = 40;
  $("compare").checked = COMPARE;
  $("question").value = QUESTION;
  $("form").requestSubmit();
  await wait(() => !running);
  const steps = document.querySelectorAll(".answer:first-child .text > span");
  [...steps].find(step => step.querySelector(".d")).click();
  document.body.dataset.done = "yes";
})();
"""


@pytest.fixture
def browse(serve_base, tmp_path):
    """Opens the page of a server, with the script after its own, and returns its document in the end."""

    def open_page(running, use, *options):
        with urllib.request.urlopen(running.url) as reply:
            page = reply.read().decode()
        page = page.replace("</body>", '<script src="use.js" defer></script></body>')

        async def with_script():
            return Response(page, media_type="text/html", headers=HEADERS)

        async def script():
            return Response(use, media_type="text/javascript")

        running.app.add_api_route("/used", with_script)
        running.app.add_api_route("/use.js", script)
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        command += ["--virtual-time-budget=60000", *options, f"{running.url}/used"]
        return subprocess.run(command, capture_output=True, text=True, timeout=240).stdout

    return open_page


def text_of(html):
    return re.sub(r"<[^>]*>", "", html)


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_a_browser_shows_the_steps_of_both_answers_and_the_tree_of_one(long_base, serve_base, browse):
    expected = generate(long_base, QUESTION, "anpd:order=2", max_new_tokens=40)[0]
    with serve_base(long_base) as running:
        use = USE.replace("COMPARE", "true").replace("QUESTION", f"'{QUESTION}'")
        html = browse(running, use, "--dump-dom")
    assert 'data-done="yes"' in html
    texts = re.findall(r'<div class="text">(.*?)</div>', html, re.DOTALL)
    assert [text_of(text) for text in texts] == [expected.text] * 2
    spans = re.findall(r'<span class="s\d[^"]*"[^>]*>(.*?</span>)</span>', texts[0])
    assert len(spans) == len(expected.steps), "one stretch for each step"
    assert sum('class="d"' in span for span in spans) == sum(step.accepted > 0 for step in expected.steps)
    assert 'class="d"' not in texts[1], "the base alone drafts nothing"
    figures = re.findall(r'<p class="figures">(.*?)</p>', html)
    assert f"acceptance length {expected.acceptance_length:.2f}" in figures[0] and "the same text" in figures[0]
    tree = re.search(r'<div id="tree">(.*?)</div>', html, re.DOTALL)[1]
    first = next(step for step in expected.steps if step.accepted)
    assert tree.count("node accepted") == first.accepted
    assert tree.count('class="node') == first.fed_candidates


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_text_that_looks_like_html_is_shown_as_text(long_base, serve_base, browse):
    question = "<img src=x onerror=alert(1)> w3"
    with serve_base(long_base) as running:
        use = USE.replace("COMPARE", "false").replace("QUESTION", f"'{question}'")
        html = browse(running, use, "--dump-dom")
    assert "&lt;img src=x onerror=alert(1)&gt; w3" in html and "<img" not in html
