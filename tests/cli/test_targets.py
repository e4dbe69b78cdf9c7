from pathlib import Path

import pytest

from lightning_hetpipe.cli.targets import locate
from lightning_hetpipe.errors import SettingError


def test_a_class_in_a_module_is_found() -> None:
    assert locate("collections.abc.Mapping.get", "model").__name__ == "get"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("lightning.Trainr", "lightning has no Trainr; did you mean lightning.Trainer?"),
        ("no_such_module.Model", "there is no module no_such_module; it is looked for in the working directory"),
        ("lightning.Trainer.fitt", "lightning.Trainer has no fitt; did you mean lightning.Trainer.fit?"),
        ("lightning.pytorch.loger.X", "lightning.pytorch has no loger; did you mean loggers?"),
        ("", "there is no module"),
    ],
)
def test_a_target_that_does_not_exist_is_named(target: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        locate(target, "model")
    assert str(caught.value).startswith(f"model._target_={target} cannot be found, ")
    assert said in str(caught.value)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(SettingError, match=r"model\._target_=sys\.path is a list; name a class or a function"):
        locate("sys.path", "model")


def test_an_import_that_fails_inside_the_users_module_keeps_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_with_missing_import.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        locate("module_with_missing_import.Model", "model")
