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


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path, error):
    (tmp_path / "a").write_text("old")
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(error):
            write_half(folder, error)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"
