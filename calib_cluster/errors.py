"""The error a user of the calibration service can cause."""


class CalibrationError(ValueError):
    """Bad input or a machine that cannot do what was asked; one line, fit for a terminal."""
