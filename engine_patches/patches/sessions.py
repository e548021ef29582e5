"""Refuses to open a session: a session rebuilds prompts out of its former requests' state."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.patch import Patch


async def open_session(original, self, obj, request=None):
    if serving.current() is not None:
        raise ValueError("sessions do not work with --kv-policy; send the whole prompt each time")
    return await original(self, obj, request)


def open_in_scheduler(original, self, recv_req):
    if serving.current() is None:
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import OpenSessionReqOutput

    return OpenSessionReqOutput(session_id=recv_req.session_id, success=False)


_WHY = "a session needs no flag: any client may open one"
_UNTIL = "sessions are tested with a policy"

PATCHES = (
    Patch(
        target=("sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.open_session"),
        parameters=("self", "obj", "request"),
        hook=open_session,
        kind=HookType.AROUND,
        why=_WHY,
        how="answers the client with status 400 and one line while a policy is served",
        until=_UNTIL,
    ),
    Patch(
        target="sglang.srt.session.session_controller.SessionController.open",
        parameters=("self", "recv_req"),
        hook=open_in_scheduler,
        kind=HookType.AROUND,
        why=_WHY + ", and HTTP workers of their own (--tokenizer-worker-num) load no plugins",
        how="answers that it was not opened while a policy is served",
        until=_UNTIL,
    ),
)
