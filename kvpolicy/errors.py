"""Errors of the policy package; each message is one line fit for a terminal."""


class KvPolicyError(ValueError):
    """Base of every error a user can cause: bad config, bad policy, bad argument."""


class GeometryError(KvPolicyError):
    """A model's config.json is missing, malformed, or describes an unsupported cache."""


class PolicyError(KvPolicyError):
    """A window policy or its artifact is malformed, corrupted, or made for another model."""
