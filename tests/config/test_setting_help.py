import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest

from fedme.config.setting_help import TABLES, Setting, settings_of
from fedme.config.settings import Settings
from fedme.core.settings import setting


@dataclass(frozen=True)
class Example:
    path: str = setting(help="required")
    size: int | None = setting(None, "number of units")
    mode: Literal["fast", "slow"] | None = setting("fast", "how to run")
    options: dict[str, int] = setting(help="more options", default_factory=dict)
    plain: float = 0.5


def test_names_defaults_choices_and_help_texts():
    assert settings_of(Example) == [
        Setting("path", "(required)", "required"),
        Setting("size", "", "number of units"),
        Setting("mode", '"fast"', "fast | slow; how to run"),
        Setting("options", "{}", "more options"),
        Setting("plain", "0.5", ""),
    ]


def test_a_setting_is_an_ordinary_field():
    assert Example("x") == Example("x", None, "fast", {}, 0.5)
    assert Example.mode == "fast"
    with pytest.raises(TypeError):
        Example()


@pytest.mark.parametrize("table", [Settings, *TABLES.values()], ids=lambda table: table.__name__)
def test_every_key_of_the_tables_has_a_help_text(table):
    assert [field.name for field in dataclasses.fields(table) if not field.metadata.get("help")] == []


def test_every_table_of_settings_is_listed():
    tables = {field.name for field in dataclasses.fields(Settings) if "Options" in str(field.type) or field.name in TABLES}
    assert tables | {"data"} == set(TABLES)
