"""The page of `blocksparse layout --html` in a headless Chromium: drawing, pointer and keys."""

from __future__ import annotations

import re

import numpy as np
import pytest

import blocksparse as bs
from blocksparse_lab.cli.layout_page import BLOCKS, Distances, Shown, render
from browser import Browser, program

needs_browser = pytest.mark.skipif(program() is None, reason="no chromium on the PATH (apt-get install chromium)")

# Position of the canvas, and whether the pixel at a point has a colour of the page.
HELPERS = """
window.at = (x, y) => {
  const box = canvas.getBoundingClientRect(), d = canvas.dataset;
  return [box.x + Number(d.x) + x * Number(d.scale), box.y + Number(d.y) + y * Number(d.scale)];
};
window.snapshot = () => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
  copy.drawImage(canvas, 0, 0);
  return copy.getImageData(0, 0, canvas.width, canvas.height);
};
window.pixel = (image, x, y) => {
  const [px, py] = at(x, y), box = canvas.getBoundingClientRect();
  const first = 4 * (Math.floor(py - box.y) * image.width + Math.floor(px - box.x));
  return [...image.data.slice(first, first + 4)];
};
window.rgb = (name) => {
  const one = document.createElement("canvas").getContext("2d");
  one.fillStyle = color(name);
  one.fillRect(0, 0, 1, 1);
  return [...one.getImageData(0, 0, 1, 1).data];
};
window.picture = () => canvas.toDataURL();
window.drawn = () => snapshot().data.filter((value, i) => i % 4 === 3 && value).length;
window.tip_text = () => (tip.hidden ? null : tip.textContent);
"""


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Open a page of layouts; at the end it must have no errors."""

    def load(*layouts, fragment="", **more):
        path = tmp_path / "page.html"
        shown = [
            Shown(f"layout {i}", layout, [("density", f"{layout.density:.3g}")]) for i, layout in enumerate(layouts)
        ]
        path.write_text(render("A page", "of layouts", shown, **more), encoding="utf-8")
        browser.open(path, fragment)
        browser.run(HELPERS)
        return browser

    browser.resize(1000, 900)
    browser.dark(False)
    yield load
    assert browser.errors == []


def seed():
    return int(np.random.default_rng().integers(1 << 30))


def press(browser, name):
    browser.run(f"document.getElementById('{name}').click()")


def point(browser, x, y):
    browser.move(*browser.run(f"at({x}, {y})"))


def mask_drawn(browser, layout):
    """Return the cells whose middle has the colour of stored blocks."""
    rows, cols = layout.grid
    script = f"""(() => {{ const blue = String(rgb('sparse')), image = snapshot(), out = [];
      for (let i = 0; i < {rows}; i++) for (let j = 0; j < {cols}; j++)
        out.push(String(pixel(image, j + 0.5, i + 0.5)) === blue);
      return out; }})()"""
    return np.array(browser.run(script)).reshape(rows, cols)


@needs_browser
@pytest.mark.parametrize("shape", [(160, 160), (96, 240), (320, 64), (32, 32)], ids=str)
def test_the_matrix_shows_the_blocks_that_are_stored(open_page, shape):
    layout = bs.patterns.random(shape, 16, density=0.2, seed=seed())
    browser = open_page(layout)
    np.testing.assert_array_equal(mask_drawn(browser, layout), layout.mask().numpy())
    browser.dark()
    browser.until("String(rgb('sparse')) !== String([11, 99, 176, 255])")
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
    np.testing.assert_array_equal(mask_drawn(browser, layout), layout.mask().numpy())


@needs_browser
def test_the_pointer_tells_block_features_and_whether_it_is_stored(open_page):
    layout = bs.BlockLayout([[True, False, False], [False, False, True]], block_size=(8, 4))
    browser = open_page(layout)
    assert browser.run("tip_text()") is None
    point(browser, 2.5, 1.5)
    assert browser.run("tip_text()") == "block row 1, column 2: stored\noutputs 8 to 15, inputs 8 to 11"
    point(browser, 1.5, 0.5)
    assert browser.run("tip_text()") == "block row 0, column 1: not stored\noutputs 0 to 7, inputs 4 to 7"
    browser.move(2, 2)
    assert browser.run("tip_text()") is None


@needs_browser
def test_wheel_buttons_keys_and_dragging_change_the_view(open_page):
    layout = bs.patterns.watts_strogatz(1024, 16, seed=0)
    browser = open_page(layout)

    def view():
        return browser.run("[canvas.dataset.scale, canvas.dataset.x, canvas.dataset.y].map(Number)")

    start, before = view(), browser.run("picture()")
    x, y = browser.run("at(20.5, 30.5)")
    browser.wheel(x, y, -400)
    browser.until(f"Number(canvas.dataset.scale) > {1.5 * start[0]}")
    assert browser.run("picture()") != before
    # The same point stays under the pointer.
    assert browser.run("at(20.5, 30.5)") == pytest.approx([x, y], abs=1)
    browser.move(x, y)
    assert browser.run("tip_text()").startswith("block row 30, column 20:")
    scale, left, top = view()
    browser.drag((x, y), (x + 50, y - 30))
    assert view() == pytest.approx([scale, left + 50, top - 30])
    press(browser, "fit")
    assert view() == pytest.approx(start)
    press(browser, "closer")
    assert view()[0] == pytest.approx(1.6 * start[0])
    press(browser, "farther")
    assert view()[0] == pytest.approx(start[0])
    for key, by in (("+", 1.4), ("0", 1)):
        browser.run(f"canvas.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
        assert view()[0] == pytest.approx(by * start[0])
    browser.run("canvas.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))")
    assert view() == pytest.approx([start[0], start[1] + 40, start[2]])
    # A resized window keeps the selection, and the whole picture stays whole.
    browser.resize(500, 900)
    browser.until("innerWidth === 500")
    assert view()[0] == pytest.approx(start[0])
    press(browser, "fit")
    assert view()[0] < start[0]
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


@needs_browser
def test_the_graph_tells_neighbours(open_page):
    layout = bs.BlockLayout(np.eye(5, dtype=bool) | np.eye(5, k=1, dtype=bool), block_size=4)
    browser = open_page(layout)
    press(browser, "graph")
    assert browser.run("drawn()") > 200
    assert browser.run("document.getElementById('graph').getAttribute('aria-pressed')") == "true"
    x, y = (float(part) for part in browser.run("[...positionsOf(layout, 'ring')].slice(4, 6)"))  # node 2
    plain = browser.run("picture()")
    point(browser, x, y)
    assert browser.run("tip_text()") == "block 2, features 8 to 11\n2 neighbours: 1, 3"
    assert browser.run("picture()") != plain
    assert browser.run("drawn()") > 200
    for name in ("torus", "hubs"):
        browser.run(f"positions.value = '{name}'; positions.dispatchEvent(new Event('change'))")
        assert browser.run("picture()") != plain


@needs_browser
def test_activity_spreads_in_as_many_steps_as_the_library_counts(open_page):
    layout = bs.patterns.watts_strogatz_2d(64, 1, neighbors=4, rewire=0.2, seed=seed())
    browser = open_page(layout)
    press(browser, "graph")
    press(browser, "spread")
    assert "from block 36, step 0 of" in browser.run("status_.textContent")
    found = browser.run("[...spread.steps]")
    np.testing.assert_array_equal(found, bs.topology.steps_from(layout, 36))
    browser.until("spread.now > 0")
    press(browser, "matrix")
    assert browser.run("spread") is None


@needs_browser
def test_rectangles_are_drawn_as_inputs_and_outputs(open_page):
    layout = bs.BlockLayout([[True, True, False], [False, True, False]], block_size=4)
    browser = open_page(layout, fragment="#as-graph")
    assert browser.run("canvas.dataset.nodes") == "5"
    places = browser.run("[...positionsOf(layout, 'columns')]")
    point(browser, places[0], places[1])
    assert browser.run("tip_text()") == "block of outputs 0, features 0 to 3\n2 neighbours: 0, 1"
    point(browser, places[8], places[9])
    assert browser.run("tip_text()") == "block of inputs 2, features 8 to 11\n0 neighbours"
    assert browser.run("document.getElementById('spread').hidden")


@needs_browser
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)], ids=str)
def test_an_empty_layout_has_a_page(open_page, grid):
    layout = bs.BlockLayout.from_indices([], [], grid, block_size=8)
    browser = open_page(layout)
    assert not mask_drawn(browser, layout).any()
    assert browser.run("status_.textContent") == "No block is stored."
    press(browser, "graph")
    assert browser.run("drawn()") > 0


@needs_browser
def test_several_layouts_are_chosen_from(open_page):
    ring, torus = bs.patterns.watts_strogatz(256, 16, seed=0), bs.patterns.random((64, 128), 16, density=0.5, seed=1)
    found = Distances(["ring", "torus </script>"], [[0, 0.25], [0.25, None]], "no <b>markup</b>")
    browser = open_page(ring, torus, distances=found)
    browser.run("which.value = '1'; which.dispatchEvent(new Event('change'))")
    np.testing.assert_array_equal(mask_drawn(browser, torus), torus.mask().numpy())
    assert browser.run("[...document.querySelectorAll('[data-of]')].map((one) => one.hidden)") == [True, False]
    words = browser.run("document.querySelector('.far').innerText").split()
    assert " ".join(words) == "ring torus </script> ring 0.000 0.250 torus </script> 0.250 -"
    assert (
        browser.run("document.querySelector('.far').parentElement.nextElementSibling.innerText") == "no <b>markup</b>"
    )


@needs_browser
def test_a_huge_grid_is_drawn_in_cells(open_page):
    layout = bs.BlockLayout.from_indices([0, 0, 249_999], [0, 1, 249_999], (250_000, 250_000), block_size=2)
    browser = open_page(layout)
    assert "3 of 62,500,000,000 blocks are stored, drawn in cells of 13 x 13." in browser.run("status_.textContent")
    assert browser.run("document.getElementById('graph').disabled")
    point(browser, 0, 0)
    browser.run("hover({clientX: at(0.5, 0.5)[0], clientY: at(0.5, 0.5)[1]})")
    said = browser.run("tip_text()")
    assert said == "block rows 0 to 12, columns 0 to 12: 2 of 169 stored\noutputs 0 to 25, inputs 0 to 25"


def test_the_page_is_one_file_that_asks_for_nothing():
    layout = bs.patterns.dense((576 * 2, 576 * 2), 2)  # the limit for drawing single blocks
    assert layout.nnz < BLOCKS
    page = render("<i>", "&", [Shown("</script><b>", layout, [("a", "<1>")])])
    assert "<i>" not in page.replace("&lt;i&gt;", "")
    assert page.count("</script>") == 2
    without_pictures = re.sub(r'src="data:image/svg\+xml;base64,[^"]*"', "", page)
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|XMLHttp", without_pictures)
    assert "&lt;1&gt;" in page
    assert len(page) < 3_000_000
