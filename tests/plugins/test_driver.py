"""What the launcher asks of the CUDA driver, told by a driver that only writes down."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from dspark_plugins.kernels import plans
from dspark_plugins.kernels.plans import Variant
from dspark_plugins.kernels.signatures import arguments_of
from dspark_plugins.tensorrt.driver import DriverLauncher, runs_on
from dspark_plugins.tensorrt.forms import Form

bindings = pytest.importorskip(
    "cuda.bindings.driver", reason="cuda-bindings is not installed: pip install cuda-bindings"
)


class WrittenDriver:
    """The driver's functions that the launcher uses, with the names of the real ones."""

    CUdevice_attribute = bindings.CUdevice_attribute
    CUfunction_attribute = bindings.CUfunction_attribute

    def __init__(self, *, capability: tuple[int, int] = (8, 9), fail: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.context = 11
        major, minor = capability
        self._answers = {
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 128,
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": major,
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": minor,
        }
        self._fail = fail

    def __getattr__(self, name: str) -> Any:
        assert hasattr(bindings, name), f"the driver has no {name}"

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            status = (
                bindings.CUresult.CUDA_ERROR_INVALID_VALUE if name == self._fail else bindings.CUresult(0)
            )
            answers = {
                "cuCtxGetCurrent": self.context,
                "cuCtxGetDevice": 0,
                "cuDeviceGet": 0,
                "cuLibraryLoadData": "library",
                "cuLibraryGetKernel": "kernel",
                "cuKernelGetFunction": "function",
            }
            if name == "cuDeviceGetAttribute":
                return status, self._answers[arguments[0].name]
            return (status, answers[name]) if name in answers else (status,)

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


def form_of(variant: Variant, *, shared_bytes: int = 2048, sm: int = 89) -> Form:
    return Form(
        key=variant.key,
        sm=sm,
        symbol=variant.kernel,
        arguments=arguments_of(variant),
        num_threads=32 * variant.num_warps,
        shared_bytes=shared_bytes,
        cooperative=variant.cooperative,
        cubin=b"\x7fELF" + variant.key.encode(),
    )


def test_arguments_are_passed_in_their_types_with_two_more_pointers() -> None:
    driver, form = WrittenDriver(), form_of(plans.merge_splits(num_heads=4, head_dim=16, dtype="fp16"))
    launcher = DriverLauncher(driver)
    launcher.load(form)
    launcher.launch(form, (12,), (2**40, 2**41, 2**42, 3, 5), stream=99)
    ((*head, shared, stream, (values, kinds), extra),) = driver.named("cuLaunchKernel")
    assert head == ["function", 12, 1, 1, 32, 1, 1] and (shared, stream, extra) == (2048, 99, 0)
    assert values == (2**40, 2**41, 2**42, 3, 5, 0, 0)
    pointer = ctypes.c_void_p
    assert kinds == (pointer, pointer, pointer, ctypes.c_int32, ctypes.c_int32, pointer, pointer)


def test_launching_neither_allocates_nor_waits() -> None:
    driver, form = WrittenDriver(), form_of(plans.schedule())
    launcher = DriverLauncher(driver)
    launcher.load(form)
    launcher.num_multiprocessors()
    before = len(driver.calls)
    launcher.launch(form, (1,), tuple(range(14)), stream=1)
    launcher.fill(2**40, 1, stream=1)
    assert launcher.num_multiprocessors() == 128
    asked = {name for name, _ in driver.calls[before:]}
    assert asked == {"cuCtxGetCurrent", "cuLaunchKernel", "cuMemsetD32Async", "cuCtxGetDevice"}
    assert driver.named("cuMemsetD32Async") == [(2**40, 0, 1, 1)]


def test_equal_kernels_are_loaded_once_in_each_context() -> None:
    driver, form = WrittenDriver(), form_of(plans.schedule())
    launcher = DriverLauncher(driver)
    for _ in range(3):
        launcher.load(form)
    assert len(driver.named("cuLibraryLoadData")) == 1
    driver.context = 12
    launcher.load(form)
    assert len(driver.named("cuLibraryLoadData")) == 2


def test_much_shared_memory_is_asked_for_when_loading() -> None:
    driver = WrittenDriver()
    launcher = DriverLauncher(driver)
    launcher.load(form_of(plans.schedule(), shared_bytes=48 * 1024))
    assert not driver.named("cuKernelSetAttribute")
    launcher.load(form_of(plans.row_limits(dtype="fp32"), shared_bytes=49 * 1024))
    assert [call[1] for call in driver.named("cuKernelSetAttribute")] == [49 * 1024]


def test_cooperative_kernels_start_cooperatively() -> None:
    driver = WrittenDriver()
    variant = plans.block_sample(
        vocab_size=300, rank=8, head=1, confidence=0, mapped=False, previous=False, dtype="fp32",
        weight_dtype="fp16", cooperative=True,
    )  # fmt: skip
    form, launcher = form_of(variant), DriverLauncher(driver)
    launcher.load(form)
    launcher.launch(form, (128,), (0,) * len(form.arguments), stream=1)
    assert len(driver.named("cuLaunchCooperativeKernel")) == 1 and not driver.named("cuLaunchKernel")


def test_a_kernel_that_was_not_loaded_is_named() -> None:
    driver, form = WrittenDriver(), form_of(plans.schedule())
    launcher = DriverLauncher(driver)
    launcher.load(form)
    driver.context = 12
    with pytest.raises(RuntimeError, match="schedule_kernel.* was not loaded in this CUDA context"):
        launcher.launch(form, (1,), (0,) * 14, stream=1)


def test_a_launch_does_not_reckon_the_kernels_hash() -> None:
    form = form_of(plans.schedule())
    assert form.sha256 is form.sha256


def test_the_capability_of_this_machines_gpu() -> None:
    assert DriverLauncher(WrittenDriver(capability=(12, 0))).capability() == 120
    assert DriverLauncher(WrittenDriver(fail="cuInit")).capability() is None


@pytest.mark.parametrize(
    ("sm", "capability", "runs"),
    [(80, 86, True), (86, 80, False), (89, 90, False), (90, 90, True), (100, 103, False), (120, 121, False)],
)
def test_kernels_run_on_later_chips_of_their_family_before_9_0(sm: int, capability: int, runs: bool) -> None:
    assert runs_on(sm, capability) is runs


@pytest.mark.parametrize(("capability", "fits"), [((8, 9), True), ((8, 6), False), ((9, 0), False)])
def test_another_architectures_kernels_are_refused(capability: tuple[int, int], fits: bool) -> None:
    launcher, form = DriverLauncher(WrittenDriver(capability=capability)), form_of(plans.schedule())
    if fits:
        launcher.load(form)
        return
    with pytest.raises(
        RuntimeError, match=f"for compute capability 8.9, .* --sm {capability[0]}{capability[1]}"
    ):
        launcher.load(form)


def test_an_error_of_the_driver_names_the_call() -> None:
    launcher = DriverLauncher(WrittenDriver(fail="cuLibraryLoadData"))
    with pytest.raises(RuntimeError, match="cuLibraryLoadData: CUDA error 1 .*INVALID_VALUE"):
        launcher.load(form_of(plans.schedule()))
