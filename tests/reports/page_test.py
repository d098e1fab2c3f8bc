"""The page: verdict first, every part shown, nothing loaded, nothing injected.

Needs no accelerator.
"""

import html.parser
import re

from absl.testing import absltest
from absl.testing import parameterized

from moejax.contracts import verdict
from moejax.reports import page as lib
from moejax.reports import words
from tests.reports import samples

_SAMPLES = ("conformant", "not_conformant", "unproven", "missing_tap",
            "degenerate", "large", "packed", "packed_wide")
_VOID = ("meta", "link", "br", "hr", "img", "input")


class _Outline(html.parser.HTMLParser):
  """Collects what a page consists of, and checks that tags are balanced."""

  def __init__(self, text: str):
    super().__init__()
    self.open: list[str] = []
    self.tags: list[tuple[str, dict]] = []
    self.unbalanced: list[str] = []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in _VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    if not self.open or self.open.pop() != tag:
      self.unbalanced.append(tag)

  def attributes(self, name: str) -> list[str]:
    return [a[name] for _, a in self.tags if name in a]


class PageTest(parameterized.TestCase):

  @parameterized.parameters(*_SAMPLES)
  def test_the_verdict_comes_first(self, name):
    report = getattr(samples, name)()
    text = lib.render(report)
    body = text[text.index("<main>") :]
    title = words.OVERALL[report["verdict"]][1]
    self.assertLess(body.index(title), body.index("<h2>Levels"))
    self.assertLess(
        body.index(f"exit code {report['exit_code']}"), body.index("<h2>")
    )

  @parameterized.parameters(*_SAMPLES)
  def test_tags_are_balanced_and_ids_unique(self, name):
    outline = _Outline(lib.render(getattr(samples, name)()))
    self.assertEqual(outline.unbalanced, [])
    self.assertEqual(outline.open, [])
    ids = outline.attributes("id")
    self.assertCountEqual(ids, set(ids))

  @parameterized.parameters(*_SAMPLES)
  def test_equal_reports_give_equal_bytes(self, name):
    make = getattr(samples, name)
    self.assertEqual(lib.render(make()), lib.render(make()))

  @parameterized.parameters(*_SAMPLES)
  def test_nothing_is_loaded_and_nothing_runs(self, name):
    text = lib.render(getattr(samples, name)())
    for way in ("://", "@import", "url(", "<script", "<link", "<iframe"):
      self.assertNotIn(way, text)
    outline = _Outline(text)
    for attribute in ("src", "srcset", "onload", "onclick", "style"):
      self.assertEqual(outline.attributes(attribute), [])
    for target in outline.attributes("href"):
      self.assertStartsWith(target, "#")
    self.assertIn("default-src 'none'", text)

  def test_packed_experts_have_their_section(self):
    self.assertNotIn('id="packed"', lib.render(samples.conformant()))
    text = lib.render(samples.packed())
    section = text[text.index('<section id="packed"') :]
    section = section[: section.index("</section>")]
    for part in ("672 of 672 elements came from packed weights", "ran packed",
                 "<code>11aa</code>", "<code>22bb</code>", "1,234", "4,321",
                 "w13.k_streams", "999 of them packed for the kernels",
                 "No clause of our contract of the experts differs"):
      self.assertIn(part, section)
    steps = section[section.index("Elements by step") :]
    self.assertRegex(
        steps, r'decode step 1</th>\s*<td class="n">64</td><td class="n">64'
        r'</td><td class="n">48</td><td class="n">48<',
    )
    text = lib.render(samples.packed_wide())
    self.assertIn("did not run packed", text)
    self.assertIn("&lt;b&gt;23", text)

  @parameterized.parameters("not_conformant", "packed")
  def test_links_lead_somewhere(self, name):
    outline = _Outline(lib.render(getattr(samples, name)()))
    ids = set(outline.attributes("id"))
    for target in outline.attributes("href"):
      self.assertIn(target.removeprefix("#"), ids)

  def test_header_cells_have_a_scope(self):
    outline = _Outline(lib.render(samples.not_conformant()))
    heads = [a for tag, a in outline.tags if tag == "th"]
    self.assertGreater(len(heads), 50)
    for attributes in heads:
      self.assertIn(attributes["scope"], ("col", "row", "colgroup"))

  def test_wide_content_scrolls_in_its_own_box(self):
    outline = _Outline(lib.render(samples.large()))
    tables = sum(tag == "table" for tag, _ in outline.tags)
    figures = sum(a.get("class") == "heat" for _, a in outline.tags)
    boxes = sum(a.get("class") == "scroll" for _, a in outline.tags)
    self.assertEqual(boxes, tables + figures)
    self.assertIn(".scroll { overflow-x: auto;", lib.render(samples.large()))

  def test_both_modes_and_paper_have_their_look(self):
    text = lib.render(samples.conformant())
    self.assertIn("color-scheme: light dark", text)
    self.assertIn("(prefers-color-scheme: dark)", text)
    self.assertIn("@media print", text)
    self.assertIn("--heat-beyond-4: ", text)

  def test_texts_from_outside_are_escaped(self):
    report = samples.not_conformant()
    report["paths"]["checkpoint"] = samples.HOSTILE
    report["arithmetics"]["portable"]["first_difference"]["prompt"] = (
        samples.HOSTILE
    )
    report["explanation"]["ours"] = samples.HOSTILE  # The headline names it.
    text = lib.render(report)
    self.assertNotIn("<script", text)
    self.assertNotIn("'a'", text)
    self.assertGreater(text.count("&lt;script&gt;alert(&#34;x&#34;)"), 4)

  def test_chinese_is_shown_as_it_is(self):
    text = lib.render(samples.conformant())
    self.assertIn(samples.CHINESE, text)
    self.assertIn('<meta charset="utf-8">', text)

  @parameterized.parameters(*verdict.ORDER)
  def test_every_verdict_has_its_words_and_its_mark(self, state):
    report = samples.conformant()
    report["arithmetics"]["native"]["levels"]["L2"] = state
    mark, name = words.VERDICTS[state]
    row = _row(lib.render(report), "L2")
    self.assertIn(name, row)
    self.assertIn(f'aria-hidden="true">{mark}<', row)

  @parameterized.parameters(*words.OVERALL)
  def test_every_overall_verdict_has_its_words(self, state):
    report = {**samples.conformant(), "verdict": state}
    self.assertIn(f"<strong>{words.OVERALL[state][1]}</strong>",
                  lib.render(report))

  def test_each_level_shows_question_verdict_and_rule(self):
    report = samples.conformant()
    text = lib.render(report)
    for level, (compared, question) in words.LEVELS.items():
      row = _row(text, level)
      self.assertIn(compared, row)
      self.assertIn(question, row)
      self.assertIn("rule: same bits", row)
      self.assertIn(
          "rule: " + report["arithmetics"]["native"]["rules"][level], row
      )

  def test_the_first_difference_is_shown_with_its_clause(self):
    report = samples.not_conformant()
    section = _section(lib.render(report), "first")
    for part in (
        "prompt <bdi>first</bdi>", "prefill", "layer 1",
        "moe.experts.combine", "token 1, embed 2", "0.75", "0.5",
        "4,194,304 ulp", "1 of 6 elements",
        "combine.accumulator: ours float32, reference bfloat16",
        "combine.order: ours slot, reference expert",
    ):
      self.assertIn(part, section)

  def test_causes_are_listed(self):
    section = _section(lib.render(samples.not_conformant()), "causes")
    self.assertIn("<code>moe.experts.combine</code>", section)
    self.assertIn("the sum of the experts&#39; outputs", section)

  def test_native_operations_beyond_their_bound_count_as_causes(self):
    report = samples.conformant()
    tap = report["arithmetics"]["native"]["taps"][-3]
    self.assertEqual(tap["tap"], "moe.experts.combine")
    tap["verdict"], tap["rule"] = verdict.BEYOND_RULE, "a rule: its source"
    section = _section(lib.render(report), "causes")
    self.assertIn("layers.1.moe.experts.combine", section)
    self.assertIn("<li>a rule: its source</li>", section)

  def test_every_rule_is_printed_with_its_source(self):
    report = samples.conformant()
    report["arithmetics"]["native"]["taps"][0]["rule"] = "a rule: its: source"
    section = _section(lib.render(report), "levels")
    self.assertIn("<dt>a rule</dt><dd>its: source</dd>", section)

  def test_a_missing_tap_is_named(self):
    section = _section(lib.render(samples.missing_tap()), "causes")
    self.assertIn("layers.0.moe.experts.combine (not in reference)", section)

  def test_the_combine_section_names_contract_clauses_and_rivals(self):
    section = _section(lib.render(samples.not_conformant()), "combine")
    for part in (
        "transformers_eager", "8 of 8 rows", "combine.accumulator",
        "dtype of each partial sum", "rounding: ieee or paper",
        "966 of 1,000 rows differ", "P32",
    ):
      self.assertIn(part, section)

  def test_other_names_of_the_same_contract_are_told(self):
    report = samples.conformant()
    first = report["explanation"]["survivors"][0]
    report["explanation"]["survivors"].append({**first, "name": "twin"})
    self.assertIn("<code>twin</code>", _section(lib.render(report), "combine"))

  def test_illegal_exchanges_come_first(self):
    report = samples.conformant()
    exchanges = report["arithmetics"]["native"]["exchanges"]
    exchanges.append({**exchanges[0], "legal": False, "margin": 7.0})
    section = _section(lib.render(report), "exchanges")
    self.assertIn("2 choices differ: 1 legal, 1 not legal", section)
    self.assertLess(section.index("✕"), section.index("✓"))
    self.assertIn("<b>2</b>", section)
    self.assertIn("0 (tie)", section)

  def test_the_page_counts_the_exchanges_that_it_leaves_out(self):
    report = samples.conformant()
    report["arithmetics"]["native"]["exchanges"] *= 1234
    section = _section(lib.render(report), "exchanges")
    self.assertIn("1,234 choices differ: 1,234 legal", section)
    self.assertIn("<summary>988 more</summary>", section)
    self.assertIn("The other 234 stand in <code>report.json</code>", section)

  def test_an_open_certificate_is_not_called_complete(self):
    section = _section(lib.render(samples.unproven()), "certificate")
    self.assertIn("not complete", section)
    self.assertIn("2 of 3 uncertain elements", section)

  def test_the_first_differing_token_is_marked(self):
    report = samples.not_conformant()
    section = _section(lib.render(report), "texts")
    self.assertIn("<mark>2</mark>", section)
    self.assertIn("<mark>3</mark>", section)
    self.assertIn("1 of 1", section)
    self.assertNotIn("<mark>", _section(lib.render(samples.conformant()),
                                        "texts"))

  def test_the_run_is_described(self):
    section = _section(lib.render(samples.conformant()), "run")
    for part in ("abc1234", "xla flags", "316be42f", "decode steps",
                 "checkpoints/tiny", "43.1", "&#34;top_k&#34;: 2"):
      self.assertIn(part, section)

  def test_a_bare_report_says_what_it_lacks(self):
    text = lib.render(samples.degenerate())
    for part in ("no tap was captured", "Not examined",
                 "Native arithmetic was not run", "only portable runs"):
      self.assertIn(part, text)

  def test_long_tables_are_folded(self):
    section = _section(lib.render(samples.large(48)), "margins")
    self.assertIn("<summary>37 more</summary>", section)
    self.assertIn("experts, layer 47", section)

  @parameterized.parameters(float("nan"), float("inf"), None)
  def test_numbers_that_are_none_are_shown(self, value):
    report = samples.conformant()
    report["arithmetics"]["native"]["exchanges"][0]["limit"] = value
    report["arithmetics"]["native"]["margins"]["tokens"]["median"] = value
    self.assertIn("–" if value != float("inf") else "∞", lib.render(report))


def _section(text: str, name: str) -> str:
  return re.search(
      f'<section id="{name}">(.*?)</section>', text, re.DOTALL
  )[1]


def _row(text: str, level: str) -> str:
  return re.search(
      f'<tr><th scope="row"><b>{level}</b>(.*?)</tr>', text, re.DOTALL
  )[1]


if __name__ == "__main__":
  absltest.main()
