"""Plug-ins of a group are found wherever Python finds them, and their absence costs few calls."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import zipfile

import pytest

from hf_compat.runtime.installed import names_no_entry_point

GROUP = "lightning.pytorch.callbacks_factory"
FORMS = {
    "wheel": ("", "plug_in-1.0.dist-info"),
    "wheel of another case": ("", "Plug_In-1.0.DIST-INFO"),
    "develop": ("", "plug_in.egg-info"),
    "egg": ("plug_in-1.0.egg", "EGG-INFO"),
}


def declare(info, group=GROUP):
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[console_scripts]\nrun = a:b\n\n[{group}]\nmine = a:b\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_a_plug_in_in_a_folder_is_found(site, monkeypatch, form):
    below, info = FORMS[form]
    if below:
        monkeypatch.syspath_prepend(str(site / below))
    assert names_no_entry_point(sys.path, GROUP)
    declare(site / below / info)
    assert [one.name for one in importlib.metadata.entry_points(group=GROUP)] == ["mine"]
    assert not names_no_entry_point(sys.path, GROUP)
    assert names_no_entry_point(sys.path, "lightning.pytorch.other_factory")


def test_zip_files_are_left_to_python(site, monkeypatch):
    declare(site / "made" / "plug_in-1.0.dist-info")
    with zipfile.ZipFile(site / "plug_in.whl", "w") as archive:
        for file in (site / "made").rglob("*"):
            if file.is_file():
                archive.write(file, file.relative_to(site / "made"))
    assert names_no_entry_point(sys.path, GROUP)
    monkeypatch.syspath_prepend(str(site / "plug_in.whl"))
    assert [one.name for one in importlib.metadata.entry_points(group=GROUP)] == ["mine"]
    assert not names_no_entry_point(sys.path, GROUP)


def test_finders_of_others_are_left_to_python(site, monkeypatch):
    class Finder(importlib.metadata.DistributionFinder):
        def find_distributions(self, context=None):
            return [importlib.metadata.Distribution.at(site / "elsewhere" / "plug_in-1.0.dist-info")]

    declare(site / "elsewhere" / "plug_in-1.0.dist-info")
    assert names_no_entry_point(sys.path, GROUP)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert [one.name for one in importlib.metadata.entry_points(group=GROUP)] == ["mine"]
    assert not names_no_entry_point(sys.path, GROUP)


def test_what_cannot_be_read_is_left_to_python(site):
    (site / "plug_in-1.0.dist-info" / "entry_points.txt").mkdir(parents=True)
    assert not names_no_entry_point(sys.path, GROUP)


def test_metadata_that_is_a_file_and_folders_that_are_gone_declare_nothing(site, monkeypatch):
    (site / "old.egg-info").write_text("Metadata-Version: 1.0\nName: old\n")
    (site / "bare-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(site / "gone"))
    assert names_no_entry_point(sys.path, GROUP)


def test_a_hundred_packages_cost_no_call_each(site):
    for number in range(100):
        declare(site / f"package{number}-1.0.dist-info", "console_scripts2")
    path = [one for one in dict.fromkeys(sys.path) if os.path.isdir(one)][:20]  # other tests leave some in it
    assert str(site) in path
    calls = []

    def note(frame, kind, argument):
        if kind == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        assert names_no_entry_point(path, GROUP)
    finally:
        sys.setprofile(None)
    assert len(calls) < 100, calls


def test_an_empty_entry_of_the_path_is_the_folder_of_the_process(site, monkeypatch):
    monkeypatch.chdir(site)
    assert names_no_entry_point([""], GROUP)
    declare(site / "plug_in-1.0.dist-info")
    assert not names_no_entry_point([""], GROUP)


@pytest.mark.parametrize(("folder", "info"), [("plain", "egg-info"), ("made.egg", "plug_in"), ("plain", "info")])
def test_other_folders_declare_nothing(tmp_path, folder, info):
    declare(tmp_path / folder / info)
    assert names_no_entry_point([str(tmp_path / folder)], GROUP)
