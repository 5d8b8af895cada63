//! Tests the device API through the whole stack: kernels of tests/kernels, the public API, the
//! engine, the `local` queue pair, or over `tcp` with `PUSHGATE_TEST_QP=tcp`. Always on the CPU, and on a GPU where there is one.
//!
//! `rig` has the two ranks on which every test runs, `step` the calls that a script is made of. Each other
//! module is one subject.

mod rig;
mod step;

mod completions;
mod hostile;
mod one_sided;
mod posted;
mod process;
mod room;
mod two_sided;
mod waits;
