"""The servers of an evaluation, one after the other."""

from inference.evaluation.served.arms import new_log


def test_each_server_of_an_arm_has_a_log_of_its_own(tmp_path):
    for name in ("1.log", "1-2.log", "1-3.log"):
        log = new_log(tmp_path, 1)
        assert log == tmp_path / name
        log.touch()
    assert new_log(tmp_path, 2) == tmp_path / "2.log"
