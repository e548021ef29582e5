"""One report a request, not one a token: what a prompt kept, in ``meta_info``."""

from sglang.srt.plugins.hook_registry import HookType

from engine_patches import serving
from engine_patches.patches.forward_plan import REPORT_KEY
from engine_patches.patches.patch import Patch


def update_request_meta_info(
    original, self, meta_info, state, customized_info, index, finish_reason
):
    if serving.current() is None:
        return original(self, meta_info, state, customized_info, index, finish_reason)
    values = customized_info.get(REPORT_KEY)
    others = {key: value for key, value in customized_info.items() if key != REPORT_KEY}
    original(self, meta_info, state, others, index, finish_reason)
    found = [value for value in (values[index] if values else ()) if value is not None]
    if found:
        state.raggedkv_report = found[0]
    if getattr(state, "raggedkv_report", None) is not None:
        meta_info[REPORT_KEY] = state.raggedkv_report
    return None


PATCHES = (
    Patch(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        parameters=("self", "meta_info", "state", "customized_info", "index", "finish_reason"),
        hook=update_request_meta_info,
        kind=HookType.AROUND,
        why="SGLang's customized_info is a list with an entry per token",
        how="takes the first entry out of the list and repeats it in every answer of the request",
        until="request-level keys of customized_info can be declared by a plugin",
    ),
)
