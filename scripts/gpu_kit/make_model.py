"""Make the model of the GPU checks once: python3 scripts/gpu_kit/make_model.py FOLDER, in the
repository's root. Then `gpu_check.py --model FOLDER/model` need not make one for each call."""

import sys

sys.path.insert(0, ".")

from tests.gpu.frame import Report, Setup
from tests.gpu.model import MODEL

setup = Setup("cuda", 1, "", None, sys.argv[1], None, {})
MODEL.work(Report(setup, MODEL.sizes["cuda"], print))
