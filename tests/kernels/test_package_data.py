"""What an installed copy needs besides the modules: the tuning table, the benchmarks' model folders, the dashboard."""

import tomllib
from pathlib import Path

from kernels.tuning import TABLE_PATH

ROOT = Path(__file__).parents[2]


def test_installed_packages_carry_their_data():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    carried = {
        path
        for package, patterns in settings.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    configurations = set((ROOT / "benchmarks" / "models").glob("*/config.json"))
    assert len(configurations) >= 2
    page = ROOT / "frontend" / "http" / "dashboard.html"
    assert {TABLE_PATH, *configurations, page} <= carried and page.is_file()
