"""Maps the top-level folders configs/ and checkpoints/ into the wheel; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

# Setuptools can discover packages or rename folders, but not both from pyproject.toml.
SHIPPED = {"data.configs": "configs", "data.checkpoints": "checkpoints"}

setup(
    packages=[*find_packages(include=["data*", "drafters*", "inference*", "train*"]), *SHIPPED],
    package_dir=SHIPPED,
)
