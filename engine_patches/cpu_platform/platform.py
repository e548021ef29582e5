"""The platform class: plain torch on the host, no kernels, no graphs."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class RaggedCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's pure-torch layers on the host's processor.

    Memory queries answer for the whole machine, in bytes. Every capability stays at its
    conservative default: no Triton, no graph capture.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def apply_server_args_defaults(self, server_args) -> None:
        """Fill in what SGLang would otherwise guess for a GPU. Changes ``server_args``."""
        if server_args.device is None:
            server_args.device = "cpu"

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Recurrent layers keep SGLang's default prefix strategy, which overlap and pages of more
        than one token need: the states it copies are written in torch (``gdn``)."""
        return True

    def get_dispatch_key_name(self) -> str:
        return "native"
