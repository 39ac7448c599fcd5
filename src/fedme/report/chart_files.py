"""Every chart of a report as a file of its own: SVG, PNG and PDF, drawn by the page itself in Chromium."""

from pathlib import Path

from fedme.report.chromium import Browser

WIDTH = 760  # of a chart's page in CSS pixels: about 18 cm on paper, with text of 9 points
SCALE = 3  # pixels of a PNG to a CSS pixel: about 290 a printed inch


def take(report: Path, folder: Path) -> list[Path]:
    """Save all charts that a report shows when it is opened; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with Browser(WIDTH, 900, SCALE) as browser:
        browser.open(report)
        for picture in browser.run("pictures()"):
            alone = f"<style>body{{margin:0}}svg{{display:block}}</style>{picture['svg']}"
            browser.open(f'<!doctype html><meta charset="utf-8">{alone}')
            size = {"width": round(picture["width"]), "height": round(picture["height"])}
            browser.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=SCALE, mobile=False)
            inches = {"paperWidth": size["width"] / 96, "paperHeight": size["height"] / 96}
            margins = dict.fromkeys(("marginTop", "marginBottom", "marginLeft", "marginRight"), 0)
            contents = {
                "svg": picture["svg"].encode(),
                "png": browser.screenshot(),
                "pdf": browser.pdf(**inches, **margins, pageRanges="1"),
            }
            for kind, content in contents.items():
                made.append(folder / f"{picture['name']}.{kind}")
                made[-1].write_bytes(content)
    return made
