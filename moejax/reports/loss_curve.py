"""The course of a training run as a picture.

Layer: reports. Imports nothing from this project.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import io

import matplotlib
from matplotlib import figure


def draw(
    losses: Sequence[float],
    levels: Mapping[str, float],
    title: str,
    kind: str,
) -> bytes:
  """Returns a PNG or SVG of the loss over steps.

  Args:
    losses: Nats per token of each step.
    levels: {label: nats per token}, drawn as horizontal lines.
    title: Above the picture.
    kind: "png" or "svg".
  """
  drawing = figure.Figure(figsize=(7, 4), layout="constrained")
  axes = drawing.add_subplot()
  axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training")
  for index, (label, nats) in enumerate(levels.items()):
    axes.axhline(nats, color=f"C{index + 1}", linewidth=1, label=label)
  axes.set_xlabel("step")
  axes.set_ylabel("nats per token")
  axes.set_title(title)
  axes.legend(frameon=False)
  out = io.BytesIO()
  with matplotlib.rc_context({"svg.hashsalt": "loss_curve"}):
    # Without a date, equal runs give equal bytes.
    drawing.savefig(
        out, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else
        {"Software": None},
    )
  return out.getvalue()
