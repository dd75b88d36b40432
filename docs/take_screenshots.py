"""Takes the pictures in docs/images: of a server's page and of a report, both of mesh-titles.

elias serve runs/mesh --examples FILE &
elias report runs/mesh
python docs/take_screenshots.py http://127.0.0.1:8000 runs/mesh/report.html
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

TEXT = (
    "Isoniazid-resistant tuberculosis in children: treatment outcomes and the response of "
    "macrophages"
)
IMAGES = Path(__file__).parent / "images"
PICTURES = {
    "page": ({"width": 1280, "height": 860}, "light"),
    "page-dark": ({"width": 1280, "height": 860}, "dark"),
    "page-phone": ({"width": 390, "height": 844}, "light"),
}


def main(url: str, report: str) -> None:
    """Type a text, choose its second label, take the picture; then the head of a report."""
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (size, scheme) in PICTURES.items():
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.goto(url)
            page.wait_for_selector("#examples button")
            page.fill("#text", TEXT)
            page.wait_for_selector("#labels .bar-row")
            if "phone" not in name:
                page.click("#labels .bar-row >> nth=1")
                page.wait_for_selector(".graph svg")
                page.mouse.move(5, 5)
            page.wait_for_timeout(500)
            page.screenshot(path=IMAGES / f"{name}.png")
        page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme="light")
        page.goto(Path(report).resolve().as_uri())
        page.screenshot(path=IMAGES / "report.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
