"""What pyproject.toml can't say: a wheel has conf/, the model recipes and the scripts for sbatch
inside of the package.

In a checkout they stay where they are (rose/places.py).
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class WithConf(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "rose"
        shutil.copytree(HERE / "conf", package / "conf", dirs_exist_ok=True)
        for folder, pattern in (("scripts", "make_*.py"), ("slurm", "*.sbatch")):
            (package / folder).mkdir(exist_ok=True)
            for file in (HERE / folder).glob(pattern):
                shutil.copy(file, package / folder)


setup(cmdclass={"build_py": WithConf})
