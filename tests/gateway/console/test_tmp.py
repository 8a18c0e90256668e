from playwright.sync_api import Page
import pytest
from tests.gateway.console.test_page import each_panel, filled
pytestmark = pytest.mark.browser
def test_x(filled: Page) -> None:
    filled.set_viewport_size({"width": 320, "height": 800})
    for panel in each_panel(filled):
        print(panel, filled.evaluate("document.documentElement.scrollWidth"))
        print(filled.evaluate("[...document.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > 321).map(e => e.tagName + '.' + e.className + '#' + e.id + ' ' + e.getBoundingClientRect().right + ' ' + e.textContent.slice(0, 60)).slice(0, 12)"))
