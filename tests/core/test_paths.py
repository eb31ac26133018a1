"""File names that are built from data: the allowed names, and the folders that their paths may lead to."""

from pathlib import Path

import pytest

from tritoncp.ops import tile_tables

H200 = tile_tables.Device("sm_90", "NVIDIA H200")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_100a", "gfx942", "gfx90a", "interpreter"])
@pytest.mark.parametrize(
    "triton", ["3.6.0", "3.7.1+git1a2b3c", "3.8.0.post1", "3.5.0rc1", "3.10.0.dev2026", "none"]
)
def test_usual_names_are_names_of_files(arch, triton):
    path = tile_tables.path_in(Path("root"), tile_tables.Device(arch, "NVIDIA H200"), triton)
    assert path == Path("root", arch, f"nvidia-h200-triton-{triton}.json")


BAD = ["../../x", "/etc", "..", ".", "", "sm_90/..", "sm_90\n", "sm_90\0", "sm_9０", "SM_90", "3.7.1/../x",
       "3.7.1\\x", "3..7", "-3.7", "3.7.1 ", "3." + "7" * 200]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_no_file_is_called_after_anything_else(name):
    with pytest.raises(ValueError, match="is not the name of an architecture like 'sm_90'"):
        tile_tables.path_in(Path("root"), tile_tables.Device(name, "x"), "3.7.1")
    if name:  # an empty version is this Triton's
        with pytest.raises(ValueError, match=r"is not the name of a Triton version like '3\.7\.1'"):
            tile_tables.path_in(Path("root"), H200, name)


@pytest.mark.parametrize(
    "product", ["../../x", "/etc/passwd", "a\0b\n", "デバイス", "", ".." * 500, "x" * 5000]
)
def test_a_products_name_stays_one_part_of_a_path(product):
    path = tile_tables.path_in(Path("root"), tile_tables.Device("sm_90", product), "3.7.1")
    assert path.parent == Path("root/sm_90") and path.name.isascii() and len(path.name) < 150
    assert not set(path.name) & set("/\\\0\n ") and not path.name.startswith((".", "-"))


@pytest.mark.parametrize("link", ["folder", "file", "circle"])
def test_tile_shapes_are_not_written_through_a_link_that_leads_out(link, tmp_path):
    root, outside = tmp_path / "configs", tmp_path / "outside"
    outside.mkdir()
    path = tile_tables.path_in(root, H200, "3.7.1")
    if link == "folder":
        root.mkdir()
        path.parent.symlink_to(outside, target_is_directory=True)
    else:
        path.parent.mkdir(parents=True)
        path.symlink_to(path if link == "circle" else outside / "x.json")
    with pytest.raises(ValueError, match=r"leads out of .*: nothing is written there; remove the link"):
        tile_tables.write(root, H200, [], {}, "3.7.1")
    assert not list(outside.iterdir())


def test_a_root_may_be_a_link_itself(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real", target_is_directory=True)
    path = tile_tables.write(tmp_path / "root", H200, [], {}, "3.7.1")
    assert (tmp_path / "real" / path.relative_to(tmp_path / "root")).is_file()
