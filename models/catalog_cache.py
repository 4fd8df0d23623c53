"""What is known of a model by the shapes of its rows, kept for a while; plain data, of which a copy may be anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from layertap.models.catalog.catalog import Catalog
from layertap.models.errors import SelectorError
from layertap.models.lru_cache import LRUCache
from layertap.models.resume.resumption import Resumption
from layertap.models.selection.hook_points import HookPoint
from layertap.models.selection.plan import ResolvedObjective, Tap
from layertap.models.spec import Shapes

MAX_CATALOGS = 16  # one for each shape of input that was asked for lately; texts of 8 to 131,072 tokens have 15 lengths
MAX_RESUMPTIONS = 16  # one for each layer, and shape of input, that forwards went on from lately
MAX_GRAD_CAM_LAYERS = 32  # one for each objective that Grad-CAM had lately, classes aside


class CatalogCache:
    """The catalogues of a model by the shape of a row, its resumptions, and the layers that Grad-CAM looks at.

    ``configured`` is the catalogue of the configured ``shapes``, ``towers`` has those of each of two towers; they are
    never dropped. Any thread may call the methods.
    """

    def __init__(self, configured: Catalog, shapes: Shapes, towers: Mapping[Shapes, Catalog] | None = None) -> None:
        self.configured = configured
        self.towers: dict[Shapes, Catalog] = {}
        self._shapes = shapes
        self._unsized = {shapes: replace(configured, sizes_known=False)}
        self.add_towers(towers or {})
        self._catalogs = LRUCache[Shapes, Catalog](MAX_CATALOGS - 1)
        self._resumptions = LRUCache[tuple[HookPoint, Shapes], Resumption | SelectorError](MAX_RESUMPTIONS)
        self._grad_cam_layers = LRUCache[ResolvedObjective, Tap](MAX_GRAD_CAM_LAYERS)

    def __reduce__(self) -> tuple[Callable[..., CatalogCache], tuple[object, ...]]:
        """A copy in another process begins with the configured catalogues alone."""
        return CatalogCache, (self.configured, self._shapes, self.towers)

    def add_towers(self, towers: Mapping[Shapes, Catalog]) -> None:
        """Keep the catalogues of two towers, each for its configured shape."""
        self.towers |= towers
        self._unsized |= {shapes: replace(catalog, sizes_known=False) for shapes, catalog in towers.items()}

    def get_catalog(self, shapes: Shapes, *, functions: bool = False) -> Catalog | None:
        """The catalogue of a shape; None where it was not surveyed lately, or not with its ``functions``."""
        known = self.configured if shapes == self._shapes else self.towers.get(shapes) or self._catalogs.get(shapes)
        return known if known is not None and (known.has_functions or not functions) else None

    def get_unsized(self, shapes: Shapes) -> Catalog:
        """The catalogue of a configured shape for rows of another, which was not surveyed."""
        return self._unsized[shapes]

    def put_catalog(self, shapes: Shapes, catalog: Catalog) -> None:
        """Keep the catalogue of a shape, in place of one that may tell less."""
        if shapes == self._shapes:
            self.configured, self._unsized[shapes] = catalog, replace(catalog, sizes_known=False)
        elif shapes in self.towers:
            self.add_towers({shapes: catalog})
        else:
            self._catalogs.put(shapes, catalog)

    def get_resumption(self, point: HookPoint, shapes: Shapes) -> Resumption | None:
        """Forwards that go on from a point; None where that was not tried lately, or where the model has none."""
        resumption = self._resumptions.get((point, shapes))
        return resumption if isinstance(resumption, Resumption) else None

    def get_grad_cam_layer(self, objective: ResolvedObjective) -> Tap | None:
        """The layer that Grad-CAM looks at; None where it was not looked for lately."""
        return self._grad_cam_layers.get(objective)

    def put_resumption(self, point: HookPoint, shapes: Shapes, resumption: Resumption | SelectorError) -> None:
        """Keep how forwards go on from a point, or that they can't."""
        self._resumptions.put((point, shapes), resumption)

    def put_grad_cam_layer(self, objective: ResolvedObjective, layer: Tap) -> None:
        """Keep the layer that Grad-CAM looks at."""
        self._grad_cam_layers.put(objective, layer)
