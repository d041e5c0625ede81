"""The whole configuration: frozen dataclasses, YAML, key=value overrides."""


class UserError(ValueError):
    """Something the user brought is wrong. The message is one line: the thing, its value, what to do."""
