"""Wheels carry the native CPU pass compiled by whoever builds them; without a compiler they are pure Python."""

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "dspark_plugins/native"


class NativeHook(BuildHookInterface):
    """Compiles the library into a wheel; an editable install compiles it where it is used."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library, and with it the platform's tag."""
        if version == "editable":
            return
        build = load_builder(Path(self.root) / "plugins" / PACKAGE / "build.py")
        self._folder = tempfile.TemporaryDirectory()
        try:
            library = build.build_wheel_library(Path(self._folder.name))
        except build.BuildError as error:
            self.app.display_warning(f"the wheel goes without native code: {error}")
            return
        build_data["force_include"][str(library)] = f"{PACKAGE}/_wheel/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Drop what was compiled."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def load_builder(path: Path) -> Any:
    """Return the module that compiles, without its package, which needs numpy."""
    spec = importlib.util.spec_from_file_location("dspark_native_build", path)
    assert spec is not None and spec.loader is not None, "a path to a Python file has both"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def platform_tag() -> str:
    """Return the wheel tag of this machine, such as linux_x86_64."""
    import sysconfig

    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
