"""The heat map: every tap a cell, the right colour, the order of execution.

Needs no accelerator.
"""

from xml.etree import ElementTree

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import verdict
from moejax.reports import heat_map as lib
from tests.reports import samples


def _tap(tap, layer=None, state=verdict.SAME_BITS, differing=0, elements=100):
  return {"layer": layer, "tap": tap, "level": "L4", "verdict": state,
          "elements": elements, "differing": differing}


def _cells(svg: str) -> dict[str, str]:
  """{full name of the tap: class} of every cell."""
  return {
      e.find("title").text.split(":")[0]: e.get("class")
      for e in ElementTree.fromstring(svg).iter("path")
      if e.find("title") is not None
  }


def _texts(svg: str) -> list[str]:
  return [e.text for e in ElementTree.fromstring(svg).iter("text")]


class HeatMapTest(parameterized.TestCase):

  @parameterized.parameters(0, 1, 4, 48, 94)
  def test_every_tap_of_every_layer_has_one_cell(self, layers):
    taps = samples.large(layers)["arithmetics"]["native"]["taps"]
    svg = lib.render(taps, "native")
    self.assertLen(_cells(svg), len(taps))
    self.assertEqual(svg.count("<title>"), len(taps))

  @parameterized.parameters(
      (verdict.SAME_BITS, 0, "heat-same"),
      (verdict.WITHIN_RULE, 1, "heat-within-1"),
      (verdict.WITHIN_RULE, 2, "heat-within-2"),
      (verdict.WITHIN_RULE, 50, "heat-within-3"),
      (verdict.BEYOND_RULE, 10, "heat-beyond-2"),
      (verdict.BEYOND_RULE, 51, "heat-beyond-4"),
      (verdict.BEYOND_RULE, 100, "heat-beyond-4"),
      (verdict.MISSING, 0, "heat-hollow"),
      (verdict.UNSUPPORTED, 0, "heat-hollow"),
  )
  def test_colour_follows_verdict_and_share(self, state, differing, expected):
    svg = lib.render([_tap("output", 0, state, differing)], "x")
    self.assertEqual(_cells(svg), {"layers.0.output": expected})

  def test_verdicts_differ_without_colour(self):
    shapes = set()
    for state in verdict.ORDER:
      svg = lib.render([_tap("output", 0, state, 0)], "x")
      shapes.add(tuple(
          e.get("d") for e in ElementTree.fromstring(svg).iter("path")
      ))
    # Same and within are both plain; the number tells them apart.
    self.assertLen(shapes, 4)
    within = lib.render([_tap("output", 0, verdict.WITHIN_RULE, 30)], "x")
    self.assertIn("30", _texts(within))

  def test_rows_are_in_order_of_execution(self):
    taps = [
        _tap("embed"), _tap("input_norm.mean", 0),
        _tap("mlp.silu", 0), _tap("output", 0),
        _tap("input_norm.mean", 1), _tap("moe.router.ids", 1),
        _tap("output", 1), _tap("final_norm.rsqrt"), _tap("logits"),
    ]
    texts = _texts(lib.render(taps, "x"))
    rows = ["embedding", "mean", "chosen experts", "silu", "after the layer",
            "rsqrt", "logits"]
    self.assertEqual([t for t in texts if t in rows], rows)

  def test_a_long_column_repeats_the_numbers_of_the_layers(self):
    taps = [
        _tap(f"{group}.{leaf}", layer)
        for layer in (0, 7)
        for group in ("a", "b", "c")
        for leaf in range(45)
    ]
    svg = lib.render(taps, "x")
    self.assertEqual(_texts(svg).count("7"), 2 + 3)  # 2 heads; 3 leaves.
    height = float(ElementTree.fromstring(svg).get("height"))
    ends = [float(e.get("y")) for e in ElementTree.fromstring(svg).iter("text")]
    self.assertLess(max(ends), height)
    self.assertLess(height - max(ends), 60)

  def test_a_layer_without_a_tap_has_no_cell_for_it(self):
    taps = [_tap("mlp.silu", 0), _tap("moe.router.ids", 1)]
    self.assertLen(_cells(lib.render(taps, "x")), 2)

  def test_two_figures_can_stand_in_one_page(self):
    for sample in (samples.conformant(), samples.not_conformant()):
      for part in sample["arithmetics"].values():
        svg = lib.render(part["taps"], "x")
        self.assertNotIn(" id=", svg)
        self.assertNotIn("url(", svg)
        self.assertNotIn("://", svg)

  def test_equal_taps_give_equal_bytes(self):
    taps = samples.not_conformant()["arithmetics"]["portable"]["taps"]
    self.assertEqual(lib.render(taps, "x"), lib.render(taps, "x"))

  def test_it_says_what_it_shows(self):
    taps = [_tap("embed"), _tap("output", 0, verdict.BEYOND_RULE, 5)]
    root = ElementTree.fromstring(lib.render(taps, "Native arithmetic"))
    self.assertEqual(root.get("role"), "img")
    self.assertEqual(
        root.get("aria-label"),
        "Heat map, Native arithmetic: 1 tap same bits, 1 tap beyond rule",
    )

  def test_its_legend_names_every_state(self):
    text = " ".join(_texts(lib.render([_tap("embed")], "x")))
    for part in ("same bits", "within the rule", "beyond the rule", "missing",
                 "unsupported", "of the elements differ"):
      self.assertIn(part, text)

  def test_titles_are_escaped_and_no_formula(self):
    svg = lib.render([_tap("embed")], "<script> $x_1$")
    self.assertNotIn("<script", svg)
    self.assertIn("<script> $x_1$", _texts(svg))

  def test_no_taps_are_said_to_be_none(self):
    self.assertIn("No tap was captured.", _texts(lib.render([], "x")))

  @parameterized.parameters(2, 48, 94)
  def test_cells_are_wide_enough_and_do_not_overlap(self, layers):
    taps = [_tap("output", layer) for layer in range(layers)]
    svg = lib.render(taps, "x")
    edges = []
    for path in ElementTree.fromstring(svg).iter("path"):
      if path.find("title") is not None:
        numbers = [float(n) for n in path.get("d").split() if n[0].isdigit()]
        edges.append((min(numbers[::2]), max(numbers[::2])))
    width = float(ElementTree.fromstring(svg).get("width"))
    for left, right in edges:
      self.assertGreaterEqual(right - left, 10)
    for left, right in zip(edges, edges[1:]):
      self.assertLess(left[1], right[0])
    self.assertLess(edges[-1][1], width)


if __name__ == "__main__":
  absltest.main()
