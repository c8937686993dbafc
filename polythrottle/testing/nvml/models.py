"""The GPUs the stand-in driver can show, in the driver's own units: MHz, mW, mJ, microseconds.

Clock tables and power limits of the cards in ``devices/`` are those of ``devices/`` (a test compares them). The
driver shows whole megahertz, so a table in steps of 7.5 MHz reads 1380, 1372, 1365. Everything about the B200 and the
laptop GPU is assumed, and so are, for all, the shares of power, the refresh periods, the base clocks and the thermal
resistance: the stand-in is simulated, and proves what a program does, not what a board draws.
"""

from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from polythrottle.domain.errors import UnknownName

# NVML_DEVICE_ARCH_*
VOLTA = 5
AMPERE = 7
ADA = 8
HOPPER = 9
BLACKWELL = 10


@dataclass(frozen=True)
class GpuModel:
    """One kind of GPU; every integer field is a number of the same name in ``fake.h``.

    Args:
        name: As the driver gives it.
        clocks_mhz: Memory clocks, highest first, each with its GPU clocks, highest first.
        limit_min_mw: Lowest power limit the driver takes.
        limit_max_mw: Highest power limit the driver takes.
        limit_default_mw: The limit it begins with; the highest if 0.
        static_mw: Power at rest without memory.
        memory_mw: Power of the memory at its highest clock.
        gpu_mw: Dynamic power at the highest clock under full load.
        period_us: How often sensors and the energy counter are refreshed.
        averages_power: 1 where nvmlDeviceGetPowerUsage is a mean of the last second, 0 where it is instantaneous.
        compute_memory_mhz: The memory clock that is not passed while there is work, as a GeForce under CUDA is held in
            performance state P2; 0 where there is none.
        counts_module: 1 where the energy counter is that of the module around the GPU.
        lacks_gpu_scope: 1 where power fields of the GPU's own scope are not supported.
        has_offsets: 1 where clocks may be offset; ranges by LACT pull request 918 and, for memory, an
            owner of a Blackwell card.
    """

    name: str
    clocks_mhz: tuple[tuple[int, tuple[int, ...]], ...]
    architecture: int
    compute_major: int
    compute_minor: int
    device_id: int
    memory_bytes: int
    base_mhz: int
    limit_min_mw: int
    limit_max_mw: int
    static_mw: int
    memory_mw: int
    gpu_mw: int
    period_us: int = 100_000
    averages_power: int = 1
    limit_default_mw: int = 0
    compute_memory_mhz: int = 0
    counts_module: int = 0
    lacks_gpu_scope: int = 0
    has_offsets: int = 0
    offset_min_mhz: int = -1000
    offset_max_mhz: int = 1000
    mem_offset_min_mhz: int = -2000
    mem_offset_max_mhz: int = 6000
    has_gpu_lock: int = 1
    has_memory_lock: int = 1
    has_power_limit: int = 1
    has_energy: int = 1
    has_tables: int = 1
    has_power_fields: int = 1
    has_memory_power: int = 0
    has_module_power: int = 0
    has_memory_temperature: int = 0
    has_mig: int = 0
    has_profiles: int = 0
    has_serial: int = 1
    mig_enabled: int = 0
    ambient_c: int = 30
    limit_c: int = 83
    millikelvin_per_w: int = 150

    @property
    def numbers(self) -> dict[str, int]:
        """The fields that ``fake.h`` knows, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, int)}


def _steps(first_mhz: float, last_mhz: float, step_mhz: float = 15) -> tuple[int, ...]:
    count = round((last_mhz - first_mhz) / step_mhz)
    return (*(int(last_mhz - step_mhz * number) for number in range(count)), int(first_mhz))


_V100 = GpuModel(
    name="Tesla V100-PCIE-16GB",
    clocks_mhz=((877, _steps(135, 1380, 7.5)),),
    architecture=VOLTA,
    compute_major=7,
    compute_minor=0,
    device_id=0x1DB410DE,
    memory_bytes=16 * 2**30,
    base_mhz=1245,
    limit_min_mw=100_000,
    limit_max_mw=250_000,
    static_mw=14_500,
    memory_mw=3_700,
    gpu_mw=218_000,
    period_us=20_000,
    averages_power=0,
    has_memory_lock=0,
    has_power_fields=0,
)
_A100 = GpuModel(
    name="NVIDIA A100-PCIE-40GB",
    clocks_mhz=((1215, _steps(210, 1410)),),
    architecture=AMPERE,
    compute_major=8,
    compute_minor=0,
    device_id=0x20F110DE,
    memory_bytes=40 * 2**30,
    base_mhz=765,
    limit_min_mw=150_000,
    limit_max_mw=250_000,
    static_mw=35_000,
    memory_mw=22_000,
    gpu_mw=215_000,
    averages_power=0,
    has_memory_temperature=1,
    has_mig=1,
)
_A40 = GpuModel(
    name="NVIDIA A40",
    clocks_mhz=((7251, _steps(210, 1740)), (405, _steps(210, 420))),
    architecture=AMPERE,
    compute_major=8,
    compute_minor=6,
    device_id=0x223510DE,
    memory_bytes=48 * 2**30,
    base_mhz=1305,
    limit_min_mw=100_000,
    limit_max_mw=300_000,
    static_mw=37_900,
    memory_mw=26_000,
    gpu_mw=215_000,
    period_us=50_000,
)
_H100 = GpuModel(
    name="NVIDIA H100 NVL",
    clocks_mhz=((2619, _steps(345, 1785)), (1593, _steps(345, 1785))),
    architecture=HOPPER,
    compute_major=9,
    compute_minor=0,
    device_id=0x232110DE,
    memory_bytes=94 * 2**30,
    base_mhz=1080,
    limit_min_mw=200_000,
    limit_max_mw=400_000,
    static_mw=60_000,
    memory_mw=30_000,
    gpu_mw=330_000,
    has_memory_power=1,
    has_memory_temperature=1,
    has_mig=1,
    millikelvin_per_w=100,
)
# As polythrottle read one (driver 580.159.04, passed through to a virtual machine): its clocks, limits, counter's step
# and samples, 72 W at rest, and offsets of which there is 0 MHz alone. It lists a memory clock of 1593 MHz too, and is
# without it here: that its memory clock cannot be locked is a public device log. What it draws under load is assumed.
_H100_SXM = replace(
    _H100,
    name="NVIDIA H100 80GB HBM3",
    clocks_mhz=((2619, _steps(345, 1980)),),
    device_id=0x233010DE,
    memory_bytes=80 * 2**30,
    limit_max_mw=700_000,
    static_mw=42_000,
    gpu_mw=620_000,
    has_memory_lock=0,
    has_offsets=1,
    offset_min_mhz=0,
    offset_max_mhz=0,
    mem_offset_min_mhz=0,
    mem_offset_max_mhz=0,
    millikelvin_per_w=60,
)
_L4 = GpuModel(
    name="NVIDIA L4",
    clocks_mhz=((6251, _steps(210, 2040)), (405, _steps(210, 645))),
    architecture=ADA,
    compute_major=8,
    compute_minor=9,
    device_id=0x27B810DE,
    memory_bytes=24 * 2**30,
    base_mhz=795,
    limit_min_mw=40_000,
    limit_max_mw=72_000,
    static_mw=15_000,
    memory_mw=6_000,
    gpu_mw=62_000,
    period_us=50_000,
    millikelvin_per_w=500,
)
_B200 = GpuModel(
    name="NVIDIA B200",
    clocks_mhz=((3996, _steps(120, 1965)),),
    architecture=BLACKWELL,
    compute_major=10,
    compute_minor=0,
    device_id=0x290110DE,
    memory_bytes=180 * 2**30,
    base_mhz=1170,
    limit_min_mw=200_000,
    limit_max_mw=1_000_000,
    static_mw=90_000,
    memory_mw=50_000,
    gpu_mw=950_000,
    has_memory_power=1,
    has_module_power=1,
    has_memory_temperature=1,
    has_mig=1,
    has_profiles=1,
    millikelvin_per_w=45,
)
# Memory clocks: what owners report, 10501, P2's 10251, 5001; highest clocks as in a public nvidia-smi -q of one (Max
# Clocks: graphics 3105, memory 10501; limits of 150 to 600 W, 450 by default). That CUDA
# holds GeForce and RTX cards in P2, one memory level below the highest:
# nicehash/NiceHashQuickMiner issue 206, noonghunna/club-3090 issue 107. The rest is assumed.
_RTX4090 = GpuModel(
    name="NVIDIA GeForce RTX 4090",
    clocks_mhz=(
        *((memory, _steps(210, 3105)) for memory in (10501, 10251, 5001)),
        *((memory, _steps(210, 420)) for memory in (810, 405)),
    ),
    architecture=ADA,
    compute_major=8,
    compute_minor=9,
    device_id=0x268410DE,
    memory_bytes=24 * 2**30,
    base_mhz=2235,
    limit_min_mw=150_000,
    limit_max_mw=600_000,
    limit_default_mw=450_000,
    static_mw=25_000,
    memory_mw=45_000,
    gpu_mw=420_000,
    compute_memory_mhz=10251,
    has_offsets=1,
    millikelvin_per_w=100,
)
# That a locked memory clock holds other clocks down: NVIDIA/open-gpu-kernel-modules issues 1265 and 1266, where the
# board runs its memory at 14001 MHz and an offset; the stand-in does not imitate it. As a public nvidia-smi -q
# shows one: graphics up to 3090, memory 14001 MHz, limits of 400 to 575 W. The lower memory clocks and the rest are
# assumed.
_RTX5090 = replace(
    _RTX4090,
    name="NVIDIA GeForce RTX 5090",
    clocks_mhz=(
        *((memory, _steps(180, 3090)) for memory in (14001, 13801, 7001)),
        *((memory, _steps(180, 420)) for memory in (810, 405)),
    ),
    architecture=BLACKWELL,
    compute_major=12,
    compute_minor=0,
    device_id=0x2B8510DE,
    memory_bytes=32 * 2**30,
    limit_min_mw=400_000,
    limit_max_mw=575_000,
    limit_default_mw=575_000,
    gpu_mw=540_000,
    compute_memory_mhz=13801,
)
# As polythrottle read one (driver 580.159.04, passed through to a virtual machine): its tables, limits and counter's
# step, 84 W at rest, 46 W of it the memory's, and offsets of which there is 0 MHz alone. What it draws under load, and
# at the lower memory clock, is assumed.
_H200 = replace(
    _H100,
    name="NVIDIA H200",
    clocks_mhz=((3201, _steps(345, 1980)), (2201, _steps(345, 1980))),
    device_id=0x233510DE,
    memory_bytes=150_754_820_096,
    limit_min_mw=200_000,
    limit_max_mw=700_000,
    static_mw=38_000,
    memory_mw=46_000,
    has_offsets=1,
    offset_min_mhz=0,
    offset_max_mhz=0,
    mem_offset_min_mhz=0,
    mem_offset_max_mhz=0,
    gpu_mw=610_000,
    millikelvin_per_w=60,
)
# That the cumulative counter is the whole module's: ml-energy/zeus pull request 172. As a public nvidia-smi -q of
# driver 550.127.05 shows one: graphics 345 to 1980, memory 2619 MHz, limits of 100 to 900 W, 87.88 W where the module
# has 169.77, and 700 W enforced though 900 were requested. The lower memory clock and the rest are assumed.
_GH200 = replace(
    _H100,
    name="NVIDIA GH200 480GB",
    clocks_mhz=((2619, _steps(345, 1980)), (1593, _steps(345, 1980))),
    device_id=0x234210DE,
    memory_bytes=96 * 2**30,
    limit_min_mw=100_000,
    limit_max_mw=900_000,
    gpu_mw=560_000,
    millikelvin_per_w=60,  # made up: cooled for the 900 W it may draw
    has_module_power=1,
    counts_module=1,
)
# That it lists no clocks and takes no power limit, and that its counter and SM clock work: rwlove/home-ops pull request
# 13238, ml-energy/zeus pull request 242; that a lock holds all the same: tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark
# issue 1, where a lock at 2200 ran at 2184 to 2190 MHz. Its clocks here are assumed.
_GB10 = GpuModel(
    name="NVIDIA GB10",
    clocks_mhz=((4266, _steps(180, 3003, 7)),),
    architecture=BLACKWELL,
    compute_major=12,
    compute_minor=1,
    device_id=0x2E1210DE,
    memory_bytes=128 * 2**30,
    base_mhz=2418,
    limit_min_mw=0,
    limit_max_mw=140_000,
    static_mw=10_000,
    memory_mw=8_000,
    gpu_mw=90_000,
    has_memory_lock=0,
    has_power_limit=0,
    has_tables=0,
)
_LAPTOP = GpuModel(
    name="NVIDIA GeForce RTX 3060 Laptop GPU",
    clocks_mhz=((7001, _steps(210, 2100)), (405, _steps(210, 420))),
    architecture=AMPERE,
    compute_major=8,
    compute_minor=6,
    device_id=0x256010DE,
    memory_bytes=6 * 2**30,
    base_mhz=900,
    limit_min_mw=0,
    limit_max_mw=115_000,
    static_mw=12_000,
    memory_mw=8_000,
    gpu_mw=95_000,
    period_us=50_000,
    has_memory_lock=0,
    has_power_limit=0,
    has_energy=0,
    has_tables=0,
    has_serial=0,
    limit_c=87,
    millikelvin_per_w=400,
)

MODELS = MappingProxyType(
    {
        **{"v100": _V100, "a100": _A100, "a100-mig": replace(_A100, mig_enabled=1), "a40": _A40},
        **{"h100": _H100, "l4": _L4, "b200": _B200, "laptop": _LAPTOP},
        **{"rtx4090": _RTX4090, "rtx5090": _RTX5090, "gh200": _GH200, "gb10": _GB10},
        **{"h100-sxm": _H100_SXM, "h200": _H200},
    }
)


def model(name: str) -> GpuModel:
    """Return the model of that name.

    Raises:
        UnknownName: If there is none.
    """
    if name not in MODELS:
        raise UnknownName("stand-in GPU", name, MODELS)
    return MODELS[name]
