"""Sets of files that take their places at once."""

import pytest

from gymjax.checkpoint.files import replacing


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_half(folder, error):
    with replacing(folder) as temporary:
        (temporary / "a").write_text("half")
        raise error


def test_a_new_folder_appears_whole(tmp_path):
    with replacing(tmp_path / "new") as temporary:
        (temporary / "a").write_text("1")
        assert not (tmp_path / "new").exists()
    assert names(tmp_path) == ["new"]
    assert names(tmp_path / "new") == ["a"]


def test_an_existing_folder_s_file_system_is_not_left(tmp_path):
    """A mounted volume or a link to one: a rename from beside it would fail."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "kept").touch()
    (tmp_path / "out").symlink_to(tmp_path / "volume")
    with replacing(tmp_path / "out") as temporary:
        (temporary / "a").write_text("1")
        assert temporary.resolve().parent == tmp_path / "volume"
    assert names(tmp_path / "volume") == ["a", "kept"]


def test_folders_inside_are_replaced_file_by_file(tmp_path):
    """transformers writes additional_chat_templates beside the tokenizer; the second export stopped half-way."""
    for text in ("old", "new"):
        with replacing(tmp_path / "out") as temporary:
            (temporary / "a").write_text(text)
            (temporary / "more").mkdir()
            (temporary / "more" / f"{text}.jinja").write_text(text)
            (temporary / "more" / "both.jinja").write_text(text)
    assert names(tmp_path / "out") == ["a", "more"]
    assert names(tmp_path / "out" / "more") == ["both.jinja", "new.jinja", "old.jinja"]
    assert (tmp_path / "out" / "more" / "both.jinja").read_text() == "new"


def test_a_library_s_own_error_of_a_full_disk_is_named(tmp_path):
    """tokenizers raises Exception with the system's text."""
    with pytest.raises(OSError, match=r"disk full while writing .*What was saved before is intact"):
        write_half(tmp_path / "new", Exception("No space left on device (os error 28)"))
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path, error):
    (tmp_path / "a").write_text("old")
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(error):
            write_half(folder, error)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"
