"""A griffe extension: the help of a `setting(...)` becomes part of the API reference."""

from __future__ import annotations

from ast import literal_eval
from typing import Any

import griffe

CONSTANTS = ("None", "True", "False")


class SettingsReference(griffe.Extension):
    """Replace `setting(default, help, ...)` by its default, and list the help with the class."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        call = attr.value
        if not isinstance(call, griffe.ExprCall) or str(call.function) != "setting":
            return
        default, text = call.arguments[:2]
        is_table = isinstance(default, griffe.ExprName) and default.name not in CONSTANTS
        attr.value = f"{default}()" if is_table else default
        attr.extra["settings"]["help"] = text

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        lines = []
        for name, member in cls.members.items():
            if member.is_attribute and (text := member.extra["settings"].get("help")):
                lines.append(f"    {name}: {literal_eval(str(text))}")
        if lines:
            text = cls.docstring.value if cls.docstring else ""
            value = "\n".join([text, "", "Attributes:", *lines])
            cls.docstring = griffe.Docstring(value, parent=cls, parser="google")
