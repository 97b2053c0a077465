import hf_compat


def test_every_public_name_loads():
    for name in hf_compat.__all__:
        assert getattr(hf_compat, name) is not None
