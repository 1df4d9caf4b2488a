"""The tiny world itself: a room with four painted walls, three pillars and a turning camera, in closed form.

Every clip is a first-person view from a camera that turns at a steady rate while it walks a small circle, so
a view comes back exactly after a full turn. That makes the true answer to "does the model remember?" known
for every pixel. Nothing is stored: a world is an integer seed.

Units: the room is 4 wide and 2 high, angles are degrees, time is frames, colours are RGB in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

HEIGHT, WIDTH = 128, 192

TURN_RATE_RANGE = (14.0, 22.0)  # degrees a frame, either direction; what the model was trained on
ORBIT_RANGE = (0.0, 0.35)  # radius of the camera's circle

_HALF_ROOM = 2.0
_HALF_HEIGHT = 1.0
_PILLARS = 3
_PILLAR_TOP = 0.999 * _HALF_HEIGHT
_NEAR = 0.05
_TAN_HALF_FOV = math.tan(math.radians(40.0))
_TAN_HALF_FOV_VERTICAL = _TAN_HALF_FOV * HEIGHT / WIDTH


class _Batch:
    """A frozen dataclass of tensors that share their first dimension."""

    def to(self, device: torch.device | str):
        """The same batch with every tensor on `device`."""
        return type(self)(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True)
class Rooms(_Batch):
    """What the camera can see, for B rooms. Walls are numbered +x, -x, +y, -y."""

    heading: Tensor  # [B] first viewing direction, radians
    center: Tensor  # [B, 2] centre of the camera's circle
    light_paint: Tensor  # [B, 4, 3] first colour of each wall
    dark_paint: Tensor  # [B, 4, 3] second colour of each wall
    frequency: Tensor  # [B, 4] how fine the pattern is, 1 to 4
    pattern: Tensor  # [B, 4] 0 upright stripes, 1 level stripes, 2 checks
    pillar_center: Tensor  # [B, 3, 2]
    pillar_radius: Tensor  # [B, 3]
    pillar_paint: Tensor  # [B, 3, 3]
    floor_paint: Tensor  # [B, 3]
    ceiling_paint: Tensor  # [B, 3]


@dataclass(frozen=True)
class Motion(_Batch):
    """How the camera moves, for B clips."""

    turn_rate: Tensor  # [B] degrees a frame; positive turns left
    orbit: Tensor  # [B] radius of the circle
    phase: Tensor  # [B] where on the circle the clip starts, degrees


def random_rooms(count: int, generator: torch.Generator) -> Rooms:
    """`count` random rooms. Drawn on the CPU, so that a seed means the same room on every device."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    def integer(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (count, *shape), generator=generator)

    return Rooms(
        heading=uniform() * 2 * math.pi,
        center=(uniform(2) - 0.5) * 1.2,
        light_paint=uniform(4, 3) * 0.8 + 0.1,
        dark_paint=uniform(4, 3) * 0.8 + 0.1,
        frequency=integer(1, 5, 4).float(),
        pattern=integer(0, 3, 4),
        pillar_center=(uniform(_PILLARS, 2) - 0.5) * 3.0,
        pillar_radius=uniform(_PILLARS) * 0.15 + 0.12,
        pillar_paint=uniform(_PILLARS, 3),
        floor_paint=uniform(3) * 0.5 + 0.2,
        ceiling_paint=uniform(3) * 0.4 + 0.5,
    )


def random_motion(count: int, generator: torch.Generator) -> Motion:
    """`count` random camera motions over the range that the model is trained on."""

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator)

    slow, fast = TURN_RATE_RANGE
    direction = torch.where(uniform() < 0.5, -1.0, 1.0)
    return Motion(
        turn_rate=direction * (slow + (fast - slow) * uniform()),
        orbit=ORBIT_RANGE[0] + (ORBIT_RANGE[1] - ORBIT_RANGE[0]) * uniform(),
        phase=360.0 * uniform(),
    )


def motion_of(turn_rate: float, orbit: float, phase: float) -> Motion:
    """One camera motion as a batch of one."""
    return Motion(*(torch.tensor([float(value)]) for value in (turn_rate, orbit, phase)))


def render(
    world_seed: int,
    turn_rate: float,
    orbit: float,
    phase: float,
    frames: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The true frames of one world as a ComfyUI image batch [frames, 128, 192, 3] in [0, 1]."""
    rooms = random_rooms(1, torch.Generator().manual_seed(world_seed)).to(device)
    motion = motion_of(turn_rate, orbit, phase).to(device)
    return render_clips(rooms, motion, frames)[0].movedim(1, -1).contiguous()


def render_clips(rooms: Rooms, motion: Motion, frames: int) -> Tensor:
    """The true frames of B worlds: [B, frames, 3, 128, 192] in [0, 1]."""
    position, heading = _camera(rooms, motion, frames)
    ray = _rays(heading)
    wall, depth, along = _hit_walls(position, ray)
    slope = _vertical_slope(heading.device)
    image = _paint_walls(rooms, wall, depth, along, slope)
    image = torch.where(
        _fits(depth, slope, _HALF_HEIGHT).unsqueeze(2),
        image,
        _paint_floor_and_ceiling(rooms, position, ray, slope),
    )
    return _paint_pillars(image, rooms, position, ray, depth, slope).clamp(0, 1)


def _camera(rooms: Rooms, motion: Motion, frames: int) -> tuple[Tensor, Tensor]:
    """Position [B, T, 2] and heading [B, T] of the camera."""
    time = torch.arange(frames, device=rooms.heading.device, dtype=torch.float32)
    turned = torch.deg2rad(motion.turn_rate)[:, None] * time
    angle = torch.deg2rad(motion.phase)[:, None] + turned
    circle = torch.stack([torch.cos(angle), torch.sin(angle)], dim=-1)
    return rooms.center[:, None] + motion.orbit[:, None, None] * circle, rooms.heading[:, None] + turned


def _rays(heading: Tensor) -> Tensor:
    """Direction of each picture column [B, T, W, 2], scaled so that its length along the view axis is one."""
    column = ((torch.arange(WIDTH, device=heading.device) + 0.5) / WIDTH * 2 - 1) * _TAN_HALF_FOV
    cos, sin = torch.cos(heading)[..., None], torch.sin(heading)[..., None]
    return torch.stack([cos - sin * column, sin + cos * column], dim=-1)


def _vertical_slope(device: torch.device) -> Tensor:
    """Height lost per unit of depth for each picture row [H]; positive looks down."""
    return ((torch.arange(HEIGHT, device=device) + 0.5) / HEIGHT * 2 - 1) * _TAN_HALF_FOV_VERTICAL


def _hit_walls(position: Tensor, ray: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which wall each column meets, how deep, and where along it (-1 to 1): all [B, T, W]."""
    origin = position[:, :, None]
    forward = ray > 0
    distance = torch.where(
        forward, (_HALF_ROOM - origin) / ray.clamp_min(1e-6), (-_HALF_ROOM - origin) / ray.clamp_max(-1e-6)
    )
    depth = distance.amin(dim=-1)
    meets_x = distance[..., 0] < distance[..., 1]
    wall = torch.where(meets_x, (~forward[..., 0]).long(), 2 + (~forward[..., 1]).long())
    hit = origin + ray * depth[..., None]
    return wall, depth, torch.where(meets_x, hit[..., 1], hit[..., 0]) / _HALF_ROOM


def _fits(depth: Tensor, slope: Tensor, limit: float) -> Tensor:
    """Whether a pixel at this depth is still on the wall, [B, T, H, W]."""
    return (slope[:, None] * depth[:, :, None]).abs() < limit


def _shade(depth: Tensor) -> Tensor:
    """Light falls off with depth, which gives flat paint a shape."""
    return 1 / (1 + 0.12 * depth)


def _paint_walls(rooms: Rooms, wall: Tensor, depth: Tensor, along: Tensor, slope: Tensor) -> Tensor:
    """Wall colours [B, T, 3, H, W], also where the wall is outside the picture's floor and ceiling lines."""
    batch = torch.arange(wall.shape[0], device=wall.device)[:, None, None]
    frequency, pattern = rooms.frequency[batch, wall][:, :, None], rooms.pattern[batch, wall][:, :, None]
    height = slope[:, None] * depth[:, :, None]
    along = along[:, :, None]
    upright = torch.sin(along * frequency * math.pi)
    level = torch.sin(height * frequency * 2.5)
    checks = torch.sin(along * frequency * 3.0) * torch.sin(height * frequency * 2.0)
    wave = torch.where(pattern == 0, upright, torch.where(pattern == 1, level, checks))
    mix = torch.sigmoid(wave * 6)[:, :, None]
    light, dark = (paint[batch, wall].movedim(-1, 2)[:, :, :, None] for paint in (rooms.light_paint, rooms.dark_paint))
    return (mix * light + (1 - mix) * dark) * _shade(depth)[:, :, None, None]


def _paint_floor_and_ceiling(rooms: Rooms, position: Tensor, ray: Tensor, slope: Tensor) -> Tensor:
    """Chequered floor below the horizon, plain ceiling above it: [B, T, 3, H, W]."""
    depth = _HALF_HEIGHT / slope.abs().clamp_min(1e-3 * _TAN_HALF_FOV_VERTICAL)
    x = position[..., 0, None, None] + ray[:, :, None, :, 0] * depth[:, None]
    y = position[..., 1, None, None] + ray[:, :, None, :, 1] * depth[:, None]
    tiles = torch.sigmoid(torch.sin(x * 4) * torch.sin(y * 4) * 5)[:, :, None]
    light = _shade(depth)[:, None]
    floor = rooms.floor_paint[:, None, :, None, None] * (0.5 + 0.5 * tiles) * light
    ceiling = rooms.ceiling_paint[:, None, :, None, None] * light
    return torch.where((slope > 0)[:, None], floor, ceiling)


def _paint_pillars(image: Tensor, rooms: Rooms, position: Tensor, ray: Tensor, depth: Tensor, slope: Tensor) -> Tensor:
    """The image with the pillars drawn in front of what is behind them."""
    squared = (ray * ray).sum(-1)
    for i in range(_PILLARS):
        offset = position - rooms.pillar_center[:, i, None]
        radius = rooms.pillar_radius[:, i, None, None]
        along = (offset[:, :, None] * ray).sum(-1)
        outside = (offset * offset).sum(-1)[..., None] - radius**2
        discriminant = along * along - squared * outside
        reach = (-along - discriminant.clamp_min(0).sqrt()) / squared
        visible = (discriminant > 0) & (outside > 0) & (reach > _NEAR) & (reach < depth)
        normal = (offset[..., 0, None] + ray[..., 0] * reach) / radius
        light = (0.6 + 0.4 * normal) * _shade(reach)
        paint = rooms.pillar_paint[:, i, None, :, None, None] * light[:, :, None, None]
        covers = visible[:, :, None] & _fits(reach, slope, _PILLAR_TOP)
        image = torch.where(covers.unsqueeze(2), paint, image)
        depth = torch.where(visible, reach, depth)
    return image
