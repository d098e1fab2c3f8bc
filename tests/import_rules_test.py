"""Who may import whom. The table is the architecture; change it on purpose."""

import ast
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

_ROOT = pathlib.Path(__file__).parents[1]
_LAYERS = (  # Bottom first. A layer may import those named after it.
    ("moejax.contracts", ()),
    ("moejax.numerics", ("moejax.contracts",)),
    ("moejax.modules", ("moejax.contracts", "moejax.numerics")),
    (
        "moejax.protocols",
        ("moejax.contracts", "moejax.numerics", "moejax.modules"),
    ),
    ("moejax.reports", ("moejax.contracts", "moejax.protocols")),
    ("pallas_kernels", ("moejax.contracts", "moejax.numerics")),
    (
        "torch_bridge",
        (
            "moejax.contracts",
            "moejax.numerics",
            "moejax.modules",
            "moejax.protocols",
        ),
    ),
    ("experiments", ("moejax", "pallas_kernels", "torch_bridge")),
)
_HOUSE = ("moejax", "pallas_kernels", "torch_bridge", "experiments", "tests")
_ONLY_IN = {  # Third-party package -> the layers that may see it.
    "torch": ("torch_bridge",),
    "transformers": ("torch_bridge",),
    "tokenizers": ("torch_bridge", "experiments"),
    "absl.flags": ("experiments",),
    "jinja2": ("moejax.reports",),
    "matplotlib": ("moejax.reports",),
    "rich": ("moejax.reports", "experiments"),
    "orbax": ("moejax.modules",),
    "chex": (),
    "hypothesis": (),
    "pickle": (),
    "torch.load": (),
}
_NO_JAX = ("moejax.contracts",)
# One file a job, named by its command: as many as there are jobs.
_BINARIES = _ROOT / "experiments"
_MAX_FILES, _MAX_LINES, _MAX_KERNEL_LINES = 15, 400, 450


def imports(source: str) -> set[str]:
  """Returns the dotted names that a module imports."""
  found = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
  return found


def within(name: str, package: str) -> bool:
  """Whether a dotted name is a package or lies in it."""
  return name == package or name.startswith(package + ".")


def violations(layer: str, may_import: tuple, source: str) -> list[str]:
  """Returns what a source file of a layer imports against the table."""
  allowed = (layer, *may_import)
  found = []
  for name in sorted(imports(source)):
    if name.split(".")[0] in _HOUSE and not any(
        within(name, a) for a in allowed
    ):
      found.append(name)
    found += [
        name
        for package, layers in _ONLY_IN.items()
        if within(name, package) and layer not in layers
    ]
    if layer in _NO_JAX and within(name, "jax"):
      found.append(name)
  return found


class ImportRulesTest(parameterized.TestCase):

  @parameterized.parameters(*_LAYERS)
  def test_layer(self, layer, may_import):
    for path in sorted((_ROOT / layer.replace(".", "/")).rglob("*.py")):
      found = violations(layer, may_import, path.read_text("utf-8"))
      self.assertEmpty(found, f"{path.relative_to(_ROOT)} imports {found}")

  @parameterized.parameters(
      ("moejax.contracts", "import jax.numpy as jnp"),
      ("moejax.numerics", "from moejax.modules import decoder"),
      ("moejax.modules", "import torch"),
      ("moejax.protocols", "from pallas_kernels import dispatch"),
      ("pallas_kernels", "from moejax.modules import moe"),
      ("torch_bridge", "import pickle"),
      ("experiments", "import chex"),
  )
  def test_a_planted_violation_is_seen(self, layer, source):
    may_import = dict(_LAYERS)[layer]
    self.assertLen(violations(layer, may_import, source), 1)

  def test_every_package_has_a_layer(self):
    known = {layer for layer, _ in _LAYERS}
    found = {"pallas_kernels", "torch_bridge", "experiments"}
    found |= {
        f"moejax.{path.name}"
        for path in (_ROOT / "moejax").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    self.assertEqual(found, known)

  def test_init_files_are_empty(self):
    for package in _HOUSE:
      for path in sorted((_ROOT / package).rglob("__init__.py")):
        self.assertEqual(path.read_text("utf-8"), "", str(path))

  @parameterized.parameters(*(layer for layer, _ in _LAYERS))
  def test_folders_and_files_stay_small(self, layer):
    top = _ROOT / layer.replace(".", "/")
    limit = _MAX_KERNEL_LINES if layer == "pallas_kernels" else _MAX_LINES
    for folder in (top, *(p for p in top.rglob("*") if p.is_dir())):
      paths = sorted(folder.glob("*.py"))
      named = [p.name for p in paths if p.name != "__init__.py"]
      if folder != _BINARIES:
        self.assertLessEqual(len(named), _MAX_FILES, named)
      for path in paths:
        lines = len(path.read_text("utf-8").splitlines())
        self.assertLessEqual(lines, limit, f"{path.name} has {lines} lines")

  def test_the_folder_of_binaries_holds_nothing_else(self):
    for path in sorted(_BINARIES.glob("*.py")):
      if path.name != "__init__.py":
        self.assertRegex(
            path.read_text("utf-8"),
            r'\nif __name__ == "__main__":\n  (binary|app)\.run\(main\)\n$',
            path.name,
        )

  def test_the_root_holds_what_it_should(self):
    allowed = {
        "moejax",
        "pallas_kernels",
        "torch_bridge",
        "experiments",
        "tests",
        "setup.cfg",
        "WORKSPACE_NOTES.md",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        "pyproject.toml",
        ".ci",
        ".gitignore",
        "requirements.lock",
    }
    ignored = {".git", "conformance_report"}
    found = {
        path.name
        for path in _ROOT.iterdir()
        if path.name not in ignored
        and not path.name.startswith((".venv", ".pytest", ".hypothesis"))
        and not path.name.endswith(".egg-info")
    }
    self.assertContainsSubset(allowed, found)
    tracked = found - allowed
    self.assertEmpty({n for n in tracked if not n.startswith(".")}, tracked)


if __name__ == "__main__":
  absltest.main()
