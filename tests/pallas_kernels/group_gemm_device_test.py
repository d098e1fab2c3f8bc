"""The grouped GEMM kernels on a GPU: the suite of the twin, in their bits."""

from absl.testing import absltest
import pytest

from pallas_kernels import launch
from tests.pallas_kernels import group_gemm_suite as suite

pytestmark = pytest.mark.accelerator


class DeviceTest(suite.KernelSuite):
  config = launch.LaunchConfig()


if __name__ == "__main__":
  absltest.main()
