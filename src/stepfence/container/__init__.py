"""Named containers beyond their steps: what there is, what was left behind, removed, saved; images brought to nodes."""

from stepfence.container.inventory import Containers, ContainerState, Standing
from stepfence.container.prefetch import Prefetched, prefetch
from stepfence.container.save import save

__all__ = ["ContainerState", "Containers", "Prefetched", "Standing", "prefetch", "save"]
