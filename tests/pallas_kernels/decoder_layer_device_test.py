"""A decoder over the kernels on a GPU: its bits are the oracle's."""

from absl.testing import absltest
import pytest

from tests.pallas_kernels import decoder_suite

pytestmark = pytest.mark.accelerator


class DeviceTest(decoder_suite.DecoderSuite):
  interpret = False
  arithmetic = "portable"


if __name__ == "__main__":
  absltest.main()
