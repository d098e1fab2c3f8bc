"""A drawing in pixels that becomes one `<svg>` element of a page.

matplotlib lays the drawing out. Its SVG is made for files of their own, with
ids, fonts, dates and fixed colours; a page needs none of these. So the result
is reduced: no ids (two drawings may stand in one document), no fonts but the
page's, and a class in the place of each colour, so that the page's light and
dark mode decide. Equal drawings give equal bytes.

Layer: reports. Imports nothing from this project.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import io
from xml.etree import ElementTree

import matplotlib
from matplotlib import figure
from matplotlib import patches
from matplotlib import path as path_lib

_SVG = "{http://www.w3.org/2000/svg}"


class Canvas:
  """Draws with classes instead of colours; y grows downwards.

  Args:
    prefix: Of every class, and of the page's variables of the same names.
    colours: {class: (light, dark)}; the dark ones are the page's to set.
    width: Pixels.
    height: Pixels.
  """

  def __init__(
      self,
      prefix: str,
      colours: Mapping[str, tuple[str, str]],
      width: int,
      height: int,
  ):
    self._prefix = prefix
    self._colours = colours
    self._size = width, height
    self._figure = figure.Figure(figsize=(width / 72, height / 72))
    self._axes = self._figure.add_axes((0, 0, 1, 1))
    self._axes.set_axis_off()
    self._axes.set_xlim(0, width)
    self._axes.set_ylim(height, 0)
    self._titles: list[str] = []

  def box(self, name: str, x, y, width, height, title: str = "") -> None:
    """Fills a rectangle; the title appears where a reader points at it."""
    corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
    self.shape(name, corners, title)

  def shape(
      self, name: str, corners: Sequence[tuple], title: str = ""
  ) -> None:
    """Fills a polygon."""
    self._add(path_lib.Path([*corners, corners[0]], closed=True), name, title)

  def line(self, name: str, x0, y0, x1, y1) -> None:
    """Draws a line."""
    self._add(path_lib.Path([(x0, y0), (x1, y1)]), name, "")

  def text(
      self, name: str, x, y, text: str, align="left", size=11, weight="normal"
  ) -> None:
    """Writes text on the baseline y."""
    self._axes.text(
        x, y, text, ha=align, fontsize=size, fontweight=weight,
        parse_math=False, gid=self._gid(name, ""),
    )

  def svg(self, alternative: str, rules: str = "") -> str:
    """Returns the drawing as one flat element.

    Args:
      alternative: The drawing in words, for those who do not see it.
      rules: Style rules beyond the colours.
    """
    drawn = io.StringIO()
    with matplotlib.rc_context(
        {"svg.hashsalt": self._prefix, "svg.fonttype": "none"}
    ):
      self._figure.savefig(drawn, format="svg", metadata={"Date": None})
    width, height = self._size
    out = ElementTree.Element("svg", {
        "class": self._prefix, "role": "img", "aria-label": alternative,
        "width": str(width), "height": str(height),
        "viewBox": f"0 0 {width} {height}",
    })
    fills = "".join(
        f".{self._prefix}-{name}{{fill:var(--{self._prefix}-{name},{light})}}"
        for name, (light, _) in self._colours.items()
    )
    ElementTree.SubElement(out, "style").text = fills + rules
    for group in ElementTree.fromstring(drawn.getvalue()).iter(f"{_SVG}g"):
      gid = group.get("id", "")
      if gid.startswith(f"{self._prefix}-"):
        name, index = gid.split(" ")
        out.append(_element(group[0], name, self._titles[int(index)]))
    return ElementTree.tostring(out, encoding="unicode")

  def _gid(self, name: str, title: str) -> str:
    """The class and the number of the title; matplotlib carries it along."""
    self._titles.append(title)
    return f"{self._prefix}-{name} {len(self._titles) - 1}"

  def _add(self, outline, name, title) -> None:
    patch = patches.PathPatch(
        outline, clip_on=False, snap=False, gid=self._gid(name, title)
    )
    self._axes.add_patch(patch)


def _element(drawn, name: str, title: str) -> ElementTree.Element:
  """One of matplotlib's elements with a class in the place of its style."""
  kind = drawn.tag.removeprefix(_SVG)
  out = ElementTree.Element(kind, {"class": name})
  if kind == "path":
    out.set("d", " ".join(drawn.get("d").split()))
    if title:
      ElementTree.SubElement(out, "title").text = title
    return out
  style = dict(item.split(": ", 1) for item in drawn.get("style").split("; "))
  for key in ("font-size", "font-weight", "text-anchor"):
    if style.get(key, "start") != "start":
      out.set(key, style[key])
  out.set("x", drawn.get("x"))
  out.set("y", drawn.get("y"))
  out.text = drawn.text
  return out
