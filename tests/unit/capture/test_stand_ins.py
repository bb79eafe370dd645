"""What stands in for functions of torch comes and goes, and leaves alone what others put there."""

from meshscope.capture.operations.stand_ins import StandIns


class Base:
    def inherited(self):
        return ["inherited"]


class Owner(Base):
    def plain(self):
        return ["plain"]

    def other(self):
        return ["other"]


PLAIN, OTHER = vars(Owner)["plain"], vars(Owner)["other"]


def note(word):
    return lambda original: lambda owner: [word, *original(owner)]


def make(*names, stays=()):
    found = StandIns()
    for name in names:
        found.add(Owner, name, note("ours"), stays=name in stays)
    return found


def test_they_are_out_while_they_rest_and_come_back():
    stand_ins = make("plain", "other", "inherited", stays=("other",))
    owner = Owner()
    seen = []
    for act in (stand_ins.rest, stand_ins.rest, stand_ins.go_on, stand_ins.go_on, stand_ins.remove):
        seen.append((owner.plain(), owner.other(), owner.inherited()))
        act()
    ours = (["ours", "plain"], ["ours", "other"], ["ours", "inherited"])
    resting = (["plain"], ["ours", "other"], ["inherited"])
    assert seen == [ours, resting, resting, ours, ours]
    assert vars(Owner)["plain"] is PLAIN
    assert vars(Owner)["other"] is OTHER
    assert "inherited" not in vars(Owner)


def test_they_can_be_removed_while_they_rest():
    stand_ins = make("plain", "other")
    stand_ins.rest()
    stand_ins.remove(lambda owner, name: name == "plain")
    stand_ins.go_on()
    assert Owner().plain() == ["plain"]
    assert Owner().other() == ["ours", "other"]
    stand_ins.remove()
    assert Owner().other() == ["other"]


def test_what_somebody_put_over_ours_stays():
    stand_ins = make("plain")
    ours = Owner.plain
    Owner.plain = note("theirs")(ours)
    try:
        stand_ins.rest()
        stand_ins.go_on()
        assert Owner().plain() == ["theirs", "ours", "plain"]
        stand_ins.remove()
        assert Owner().plain() == ["theirs", "ours", "plain"]
    finally:
        Owner.plain = PLAIN


def test_what_somebody_puts_there_while_ours_rests_is_called_below_it():
    stand_ins = make("plain")
    stand_ins.rest()
    Owner.plain = theirs = note("theirs")(PLAIN)
    try:
        stand_ins.go_on()
        assert Owner().plain() == ["ours", "theirs", "plain"]
        stand_ins.remove()
        assert vars(Owner)["plain"] is theirs
    finally:
        Owner.plain = PLAIN


def test_what_torch_lacks_is_left_out():
    stand_ins = StandIns()
    stand_ins.add(Owner, "missing", note("ours"))
    stand_ins.add(None, "missing", note("ours"))
    stand_ins.rest()
    stand_ins.go_on()
    assert not hasattr(Owner, "missing")
