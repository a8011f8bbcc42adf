import time
from bridge.bus.handles import resolve_handle
from bridge.bus.results import fetch, believe
from bridge.bus.claims import Beat
from bridge.result import Phase
from tests.bridge.bus.world import snapshot
def test_x(world, tmp_path):
    before = snapshot(world.house.clone)
    t=time.time(); s = world.submit(); print("submit", time.time()-t)
    assert snapshot(world.house.clone) == before
    t=time.time(); p = world.mirror.refresh(); print("refresh1", time.time()-t, p)
    t=time.time(); p = world.mirror.refresh(); print("refresh2", time.time()-t)
    t=time.time(); c = world.claim(p[0]); print("claim", time.time()-t)
    t=time.time(); c.beat(Beat(Phase.RUNNING, 1.0)); print("beat", time.time()-t)
    t=time.time(); pub = world.answer(s, held=c); print("answer", time.time()-t, pub)
    t=time.time(); st = resolve_handle(world.git, world.remote, s.nonce[:20]); print("resolve", time.time()-t, st)
    t=time.time(); f = fetch(world.git, world.remote, st); print("fetch", time.time()-t)
    b = believe(f, trusted=tmp_path/"no"); print(b.sentence, b.files)
    assert snapshot(world.house.clone) == before
    print(world.house.remote_refs(), world.mirror.refresh())
