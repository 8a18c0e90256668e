"""The benchmarks of the kernels import Triton, so their tests are not collected where there is none, as on macOS."""

from tests.conftest import HAS_TRITON

collect_ignore_glob = [] if HAS_TRITON else ["*"]
