"""The one exception of the test cluster."""


class ClusterError(Exception):
    """The test cluster cannot do what was asked; the message is one line that says what and where."""
