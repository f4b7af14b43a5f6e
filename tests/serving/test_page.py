"""The page at `/`: one file without a network, driven in a browser where there is one."""

import re
import shutil

import httpx2 as httpx
import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")


def test_the_page_loads_nothing_from_elsewhere(address):
    response = httpx.get(f"{address}/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in response.headers["content-security-policy"]
    # Addresses are relative, so that a proxy may serve it under any path.
    assert not re.findall(r"https?://|(?:src|href)=\"/|@import|fetch\(\"/", response.text)
    assert re.findall(r"fetch\(\"(v1/[a-z/]+)\"", response.text) == [
        "v1/chat/completions",
        "v1/models",
    ]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_conversation_in_a_browser(address, width, height, scheme, tmp_path):
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=True
        )
        page, errors = context.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{address}/")
        if width < 800:
            page.click("#figures-button")
        for name, value in (("temperature", "0"), ("max_tokens", "40")):
            page.fill(f"#{name}", value)
        page.check("#compare")
        if width < 800:
            page.click("#figures-button")
        page.fill("#input", "the thin thing")
        page.press("#input", "Enter")
        page.wait_for_function("document.querySelectorAll('.turn').length == 2")
        page.wait_for_function("document.getElementById('send').textContent == 'Send'")
        expected = httpx.post(
            f"{address}/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "the thin thing"}],
                "temperature": 0,
                "max_tokens": 40,
            },
        ).json()["choices"][0]
        turns = page.query_selector_all(".turn")
        assert turns[1].text_content() == expected["message"]["content"]
        statistics = expected["speculative_decoding_stats"]
        shown = float(page.text_content("#per-call"))
        assert shown == pytest.approx(statistics["mean_acceptance_length"], abs=0.006)
        assert len(page.query_selector_all("#bars > div")) == statistics["num_spec_tokens"]
        assert page.text_content("#plain").endswith("\u00d7")
        assert "measured" in page.text_content("#plain-text")
        drafted = "".join(each.text_content() for each in page.query_selector_all(".drafted"))
        assert 0 < len(drafted) <= len(expected["message"]["content"])
        # Nothing is wider than the window, and nothing covers what is written.
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert errors == []
        picture = tmp_path / f"{width}-{scheme}.png"
        page.screenshot(path=picture)
        assert picture.stat().st_size > 10_000
        browser.close()
