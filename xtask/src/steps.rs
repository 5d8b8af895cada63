//! The steps of `cargo xtask test`: their names, budgets and needs, and what they do.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, bail, ensure};

use crate::bench::{Bench, Outcome, both, passed};
use crate::output::say;
use crate::programs::{Kind, Program};
use crate::system::{self, Need};
use crate::venv::Venv;
use crate::{
    aarch64, bindings, cuda, layout, package, plugin, process, programs, promises, sim, site, supply_chain,
    test_programs, vm, words,
};

/// The lane of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Before all other steps, because these need what the step does.
    First,
    /// One of the steps that wait for guests, peers or the clock. They run one after the other, their output as it comes.
    Main,
    /// One of the steps that only compute. They run one after the other beside those of [`Lane::Main`], with lower
    /// priority, and the output of each is shown when the step has ended and stdout is free.
    Beside,
}

/// One step of the table.
pub struct Step {
    /// The name for `--only` and the summary.
    pub name: &'static str,
    /// Seconds that the step should take on two quiet cores, with nothing built or fetched before.
    /// Reported, never enforced.
    pub budget: u64,
    /// The runs that include the step.
    pub when: When,
    /// The steps beside which the step runs.
    pub lane: Lane,
    /// What the step needs; without any of it the step is skipped.
    pub needs: &'static [Need],
    /// What the step does, for `--list`.
    pub about: &'static str,
    /// The function that runs the step.
    pub run: fn(&mut Bench) -> Result<Outcome>,
}

/// The runs of `cargo xtask test` that include a step, if `--only` does not name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// All runs but those with `--quick`.
    Default,
    /// All runs, also those with `--quick`.
    Always,
    /// Only runs with `--quick`: in other runs a larger step does the same and more.
    Quick,
    /// Only runs with `--full`.
    Full,
}

impl When {
    /// Whether a run with these options includes the step.
    pub fn is_in(self, quick: bool, full: bool) -> bool {
        match self {
            When::Default => !quick,
            When::Always => true,
            When::Quick => quick,
            When::Full => full,
        }
    }
}

/// All steps, in the order in which those of a lane run. Without `--full` the budgets of those that run one after the other add
/// up to less than 30 minutes, with `--quick` all of them to a few.
pub const STEPS: &[Step] = &[
    Step {
        name: "system",
        budget: 20,
        when: When::Default,
        lane: Lane::First,
        needs: &[],
        about: "what the other steps need; installs it when run as root, but with --no-install",
        run: |bench| {
            if !bench.no_install {
                system::install(&bench.paths.root, bench.guard)?;
            }
            let missing = system::report();
            Ok(missing.map_or(Outcome::Passed, Outcome::Skipped))
        },
    },
    Step {
        name: "format",
        budget: 3,
        when: When::Always,
        lane: Lane::Beside,
        needs: &[Need::Rustfmt],
        about: "rustfmt finds nothing to change",
        run: |bench| bench.cargo(&["fmt", "--all", "--", "--check"]),
    },
    Step {
        name: "promises",
        budget: 1,
        when: When::Always,
        lane: Lane::Beside,
        needs: &[],
        about: "each promise has tests, and docs/promises.md lists them all",
        run: |bench| passed(promises::run(&bench.paths, true)),
    },
    Step {
        name: "words",
        budget: 2,
        when: When::Always,
        lane: Lane::Beside,
        needs: &[],
        about: "no page, comment or message has a phrase that makes a reader stop",
        run: |bench| passed(words::check(&bench.paths.root)),
    },
    Step {
        name: "kernels",
        budget: 60,
        when: When::Default,
        lane: Lane::Beside,
        needs: &[Need::Cxx],
        about: "all device code compiles for sm_80, sm_90, sm_100 and the CPU; fetches nvcc once",
        run: kernels,
    },
    Step {
        name: "clippy",
        budget: 65,
        when: When::Always,
        lane: Lane::Beside,
        needs: &[Need::Clippy, Need::Cxx],
        about: "clippy finds nothing to say",
        run: |bench| {
            bench.cargo(&[
                "clippy",
                "--workspace",
                "--all-targets",
                // Build scripts and macros are those of the tests, so they are compiled once.
                "--release",
                "--features",
                "test-ungated,pushgate-sim/sim",
                "--",
                "-D",
                "warnings",
            ])
        },
    },
    Step {
        name: "unit",
        budget: 150,
        when: When::Quick,
        lane: Lane::Main,
        needs: &[Need::Cxx, Need::Valgrind],
        about: "the unit tests, which the step tests runs too",
        run: |bench| bench.cargo(&["test", "--workspace", "--release", "--lib", "--bins", "--no-fail-fast"]),
    },
    Step {
        name: "docs",
        budget: 18,
        when: When::Default,
        lane: Lane::Beside,
        needs: &[Need::Cxx],
        about: "the documentation builds without a warning",
        run: |bench| {
            bench.cargo_with(
                &["doc", "--workspace", "--no-deps", "--release"],
                &[("RUSTDOCFLAGS", "-D warnings")],
            )
        },
    },
    Step {
        name: "bindings",
        budget: 32,
        when: When::Default,
        lane: Lane::Beside,
        needs: &[Need::Libclang, Need::Rustfmt],
        about: "abi.rs is what bindgen makes of abi.h, the verbs bindings what it makes of verbs.h, the C API's header what cbindgen makes",
        run: |bench| {
            bench.skips.extend(bindings::without_verbs());
            passed(bindings::run(&bench.paths, true, bench.guard))
        },
    },
    Step {
        name: "abi-layout",
        budget: 2,
        when: When::Default,
        lane: Lane::Beside,
        needs: &[Need::Cxx],
        about: "C, C++ and Rust see the same sizes, offsets and constants",
        run: |bench| passed(layout::check(&bench.paths, bench.guard)),
    },
    Step {
        name: "tests",
        budget: 540,
        when: When::Default,
        lane: Lane::Main,
        needs: &[Need::Cxx, Need::Valgrind],
        about: "all unit and integration tests",
        run: tests,
    },
    Step {
        name: "c-api",
        budget: 25,
        when: When::Default,
        lane: Lane::Main,
        needs: C_API_NEEDS,
        about: "libpushgate.so installed into a folder: its symbols, its manual, programs in C against it, wrong calls under ASan and valgrind",
        run: |bench| {
            bench.cargo(&[
                "test",
                "--release",
                "--package",
                "pushgate-c",
                "--test",
                "installed",
                "--no-fail-fast",
            ])
        },
    },
    Step {
        name: "nixl",
        budget: 210,
        when: When::Default,
        lane: Lane::Main,
        needs: &[Need::Cxx, Need::Python],
        about: "programs over NIXL's own wheel with the plugin as its backend (tests/nixl), `pushgate nixl-check`, the example; fetches the wheel once",
        run: nixl,
    },
    Step {
        name: "metrics",
        budget: 40,
        when: When::Default,
        lane: Lane::Main,
        needs: &[Need::Cxx],
        about: "Debian's Prometheus scrapes an allreduce, and promtool checks the text; fetches the two once",
        run: metrics,
    },
    Step {
        name: "loom",
        budget: 47,
        when: When::Default,
        lane: Lane::Beside,
        needs: &[],
        about: "the shared rings and a copier that falls asleep under every interleaving",
        run: loom,
    },
    Step {
        name: "tsan",
        budget: 32,
        when: When::Default,
        lane: Lane::Beside,
        needs: &[Need::Cxx],
        about: "device code and engine under ThreadSanitizer",
        run: tsan,
    },
    Step {
        name: "sim",
        budget: 180,
        when: When::Default,
        lane: Lane::Beside,
        needs: &[],
        about: "clusters in virtual time, with faults, for 2 minutes; each fault planted in them is found",
        run: simulate,
    },
    Step {
        name: "fuzz",
        budget: 20,
        when: When::Default,
        lane: Lane::Beside,
        needs: &[Need::Cxx],
        about: "changed bytes for each parser that a stranger reaches, a second for each, 20 with --full: no panic, no hang, bounded memory",
        run: fuzz,
    },
    Step {
        name: "example",
        budget: 12,
        when: When::Default,
        lane: Lane::Main,
        needs: &[Need::Cxx],
        about: "the example allreduce, and the bench allreduce on 4 CPU ranks with the proxy as thread and as process",
        run: |bench| {
            let mut example = bench.command();
            example.args(["run", "--release", "--example", "allreduce", "--", "--device", "cpu", "--json"]);
            let output = process::capture(example, true, bench.guard)?;
            check_result(output.lines().last().unwrap_or_default())?;
            allreduce(bench, 4, &[])?;
            allreduce(bench, 4, &["--proxy", "process"])
        },
    },
    Step {
        name: "chaos",
        budget: 65,
        when: When::Default,
        lane: Lane::Main,
        needs: &[Need::Cxx],
        about: "links of `local` and `tcp` queue pairs break, and ranks are stopped and killed, for 60 s, about 500 times: nothing is lost",
        run: chaos,
    },
    Step {
        name: "vm",
        budget: 710,
        when: When::Default,
        lane: Lane::Main,
        needs: vm::NEEDS,
        about: "suites in a virtual machine with soft-RoCE devices; fetches its kernel once",
        run: |bench| vm::step(bench, 1),
    },
    Step {
        name: "vm-pair",
        budget: 175,
        when: When::Default,
        lane: Lane::Main,
        needs: vm::NEEDS,
        about: "suites in two virtual machines that are joined by a cable",
        run: |bench| vm::step(bench, 2),
    },
    Step {
        name: "site",
        budget: 400,
        when: When::Full,
        lane: Lane::Beside,
        needs: &[Need::Cxx],
        about: "docs/ as a site with rustdoc beside it, without a dead link; compiles mdBook once",
        run: |bench| {
            say!("{}", site::build(&bench.paths, bench.guard)?.display());
            Ok(Outcome::Passed)
        },
    },
    Step {
        name: "aarch64",
        budget: 1000,
        when: When::Full,
        lane: Lane::Main,
        needs: aarch64::NEEDS,
        about: "everything for 64-bit ARM: C, C++, the kernel module and Rust compile, and tests, allreduces and the NCCL plugin run under QEMU, some with pages of 64 KiB, barriers under herd7; fetches QEMU, herd7, g++, Linux and Debian's rustc once",
        run: aarch64::step,
    },
    Step {
        name: "package",
        budget: 600,
        when: When::Full,
        lane: Lane::Main,
        needs: vm::suites::PACKAGE_NEEDS,
        about: "the Debian package, installed and removed in a virtual machine",
        run: |bench| vm::step_of_one(bench, "package"),
    },
    Step {
        name: "nccl-device",
        budget: 120,
        when: When::Full,
        lane: Lane::Beside,
        needs: &[Need::Cxx, Need::Python, Need::Launcher],
        about: "programs on NCCL's device API compile; fetches nvcc and NCCL once. They run on GPU hosts",
        run: |bench| passed(cuda::compile_on_nccl(&bench.paths, bench.guard)),
    },
    Step {
        name: "supply-chain",
        budget: 500,
        when: When::Full,
        lane: Lane::Beside,
        needs: &[],
        about: "licences, sources, duplicates and known holes of all crates, and the bill of materials; compiles cargo-deny and cargo-cyclonedx once",
        run: supply_chain::step,
    },
    Step {
        name: "wheel",
        budget: 700,
        when: When::Full,
        lane: Lane::Main,
        needs: package::test::WHEEL_NEEDS,
        about: "the Python wheel, built for glibc 2.28, in a fresh environment without Rust: bindings, types, the plugins, agents of NIXL; fetches zig once",
        run: package::test::wheel,
    },
    Step {
        name: "packages",
        budget: 400,
        when: When::Full,
        lane: Lane::Main,
        needs: package::test::NEEDS,
        about: "deb, RPM, archive and wheel, each installed, used and removed in a small Debian without Rust, archive and wheel in Debian 11 too, and the system's proxy as a service of systemd; each Debian is fetched once",
        run: package::test::packages,
    },
    Step {
        name: "packages-arm",
        budget: 850,
        when: When::Full,
        lane: Lane::Main,
        needs: package::test::NEEDS,
        about: "deb, RPM, archive and wheel for 64-bit ARM, each installed, used and removed in a small Debian for ARM under QEMU, which is fetched once",
        run: package::test::packages_for_arm,
    },
    Step {
        name: "nccl-gpu",
        budget: 450,
        when: When::Full,
        lane: Lane::Main,
        needs: vm::NEEDS,
        about: "the NCCL plugin over soft-RoCE on GPU memory, with the CPU executor as GPU, in a virtual machine",
        run: |bench| vm::step_of_one(bench, "nccl-gpu"),
    },
    Step {
        name: "nixl-vm",
        budget: 90,
        when: When::Full,
        lane: Lane::Main,
        needs: vm::NEEDS,
        about: "virtual machine with soft-RoCE, suite `nixl`: agents of the NIXL plugin",
        run: |bench| vm::step_of_one(bench, "nixl"),
    },
    Step {
        name: "siw-faults",
        budget: 150,
        when: When::Full,
        lane: Lane::Main,
        needs: vm::NEEDS,
        about: "software iWARP, in a virtual machine: ports, addresses and ranks that go; links that break and are replaced; the NCCL plugin",
        run: |bench| vm::step_of_one(bench, "siw-faults"),
    },
    Step {
        name: "verbs-cm",
        budget: 150,
        when: When::Full,
        lane: Lane::Main,
        needs: vm::NEEDS,
        about: "queue pairs over soft-RoCE that rdma_cm connects, in a virtual machine: their suite with immediate data and without",
        run: |bench| vm::step_of_one(bench, "verbs-cm"),
    },
    Step {
        name: "rma",
        budget: 180,
        when: When::Full,
        lane: Lane::Main,
        needs: vm::NEEDS,
        about: "the NCCL plugin's tables for one-sided operations over soft-RoCE and over TCP, in a virtual machine",
        run: |bench| vm::step_of_one(bench, "rma"),
    },
    Step {
        name: "chaos-pair",
        budget: 200,
        when: When::Full,
        lane: Lane::Main,
        needs: vm::NEEDS,
        about: "chaos over two virtual machines that are joined by a cable, which each of them cuts and joins again",
        run: |bench| vm::step_of_one(bench, "chaos-pair"),
    },
    Step {
        name: "tcp-pair",
        budget: 60,
        when: When::Full,
        lane: Lane::Main,
        needs: vm::NEEDS,
        about: "queue pairs over tcp between two virtual machines: over 50 ms and 1 % loss, and sends without a copy",
        run: |bench| vm::step_of_one(bench, "tcp-pair"),
    },
    Step {
        name: "properties",
        budget: 900,
        when: When::Full,
        lane: Lane::Beside,
        needs: &[],
        about: "the proxy's property tests with 20,000 cases each",
        run: |bench| {
            let arguments = ["test", "--release", "--package", "pushgate-core", "--package", "pushgate-link"];
            let arguments = [
                &arguments[..],
                &["--package", "pushgate-link-tcp", "--package", "pushgate-link-verbs"],
                &["--package", "pushgate-engine", "--package", "pushgate-tests"],
                &["--features", "pushgate-tests/test-ungated", "--lib", "--test", "endpoint"],
            ]
            .concat();
            bench.cargo_with(&arguments, &[("PROPTEST_CASES", "20000")])
        },
    },
    Step {
        name: "memcheck",
        budget: 300,
        when: When::Full,
        lane: Lane::Main,
        needs: &[Need::Cxx, Need::Valgrind],
        about: "the NCCL plugin under its caller, under valgrind's memcheck",
        run: memcheck,
    },
    Step {
        name: "example-8",
        budget: 120,
        when: When::Full,
        lane: Lane::Main,
        needs: &[Need::Cxx],
        about: "the bench allreduce on 8 CPU ranks",
        run: |bench| allreduce(bench, 8, &[]),
    },
];

/// NIXL as its users install it, and what its Python module imports.
pub const NIXL_WHEELS: &[&str] = &["nixl-cu13==1.5.1", "numpy==2.4.6"];

/// What installing the C library needs, and what programs are built and run with against it.
const C_API_NEEDS: &[Need] = &[Need::Cxx, Need::Strip, Need::CBuild, Need::Valgrind];

/// The names of all steps.
pub fn names() -> impl Iterator<Item = &'static str> {
    STEPS.iter().map(|step| step.name)
}

fn nixl(bench: &mut Bench) -> Result<Outcome> {
    let plugin = plugin::build_nixl(&bench.paths, bench.guard)?;
    let venv = Venv::new(&bench.paths, "nixl-venv", NIXL_WHEELS, "NIXL's wheel");
    venv.make(&bench.paths, bench.guard)?;
    let mut run = process::command(venv.program("python"), &bench.paths.root.join("tests/nixl"));
    run.arg("run.py").arg("--plugin").arg(&plugin).args(["--seconds", if bench.full { "20" } else { "5" }]);
    process::run(run, bench.guard)?;
    bench.cargo(&["build", "--release", "--package", "pushgate-cli"])?;
    let mut check = process::command(venv.program("python"), &bench.paths.root.join("tests/nixl"));
    check.arg("check.py").arg("--plugin").arg(plugin);
    check.arg("--command").arg(bench.paths.target.join("release/pushgate"));
    passed(process::run(check, bench.guard))
}

fn kernels(bench: &mut Bench) -> Result<Outcome> {
    cuda::compile_for_cpu(&bench.paths, bench.guard)?;
    if cuda::present(&bench.paths).is_none()
        && let Some(reason) = system::unmet(&[Need::Python])
    {
        bench
            .skips
            .push(format!("nothing compiled for a GPU: no CUDA 13 nvcc here, and fetching it {reason}"));
        return Ok(Outcome::Passed);
    }
    let toolkit = cuda::toolkit(&bench.paths, bench.guard)?;
    passed(cuda::compile_for_gpu(&bench.paths, &toolkit, bench.guard))
}

/// Test programs that run alone, because what they start computes all the time. Threads of NCCL's callers poll: beside others `nccl`
/// took 55 to 77 s in place of 20, and what ran beside it more than twice its time.
const ALONE: &[&str] = &["nccl", "nccl_trace"];

/// Tests of queue pairs in which a rogue engine writes records into a ring that a link over TCP does not have.
pub const RING_TESTS: [&str; 2] =
    ["p4::p4_a_skipped_sequence_number_is_an_overrun", "p4::p4_an_overwritten_link_slot_is_an_overrun"];

fn tests(bench: &mut Bench) -> Result<Outcome> {
    let all = ["test", "--workspace", "--no-run"];
    let all = programs::build(&bench.paths, &all, &[], bench.guard)?;
    // A target that needs a feature of its own, so that every other test has the library as users build it.
    let ungated = [vm::suites::ENDPOINT_TESTS, &["--test", "no_alloc", "--no-run"]].concat();
    let ungated = programs::build(&bench.paths, &ungated, &[], bench.guard)?;
    // Some tests load its NVRTC, and skip themselves without. The step kernels fetches it too, meanwhile or after this
    // step, and reports why that fails.
    let _ = cuda::toolkit(&bench.paths, bench.guard);
    let (mut alone, mut others) = (Vec::new(), Vec::new());
    let mut add = |program: &Program, command| {
        if ALONE.contains(&program.name.as_str()) { alone.push(command) } else { others.push(command) }
    };
    all.iter().filter(|p| p.kind == Kind::Test).for_each(|p| add(p, bench.test(p, &[])));
    let named = |programs: &[Program], name: &str| {
        let found = programs.iter().find(|program| program.kind == Kind::Test && program.name == name);
        found.cloned().with_context(|| format!("the test {name} was not built"))
    };
    let (endpoint, no_alloc) = (named(&ungated, "endpoint")?, named(&ungated, "no_alloc")?);
    add(&endpoint, bench.test(&endpoint, &[]));
    let skip = RING_TESTS.map(|test| ["--skip", test]).concat();
    let mut over = |program: &Program, arguments: &[&str], variable: &str, qp: &str| {
        let mut command = bench.test(program, arguments);
        command.env(variable, qp);
        add(program, command);
    };
    // Where the kernel allows no io_uring, `tcp-uring` says so and runs over sockets once more.
    for qp in ["tcp", "tcp-uring"] {
        over(&endpoint, &skip, "PUSHGATE_TEST_QP", qp);
        over(&no_alloc, &[], "PUSHGATE_TEST_QP", qp);
    }
    // The device API's kernels. The tests of a proxy process stay over `local`.
    over(&named(&all, "device_api")?, &[], "PUSHGATE_TEST_QP", "tcp");
    // NCCL's table of one-sided operations.
    over(&named(&all, "rma")?, &[], "PUSHGATE_QP", "tcp");
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let ran = test_programs::run(alone, others, test_programs::at_once(cores), bench.guard);
    let documentation = bench.cargo(&["test", "--workspace", "--release", "--no-fail-fast", "--doc"]);
    ran?;
    documentation
}

/// Runs Prometheus on the loopback, from a folder into which Debian's package is unpacked: installing it would start a service.
fn metrics(bench: &mut Bench) -> Result<Outcome> {
    let folder = match prometheus(bench) {
        Ok(folder) => folder,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let folder = folder.to_str().context("the target folder's name is no UTF-8")?;
    let tests = ["test", "--release", "--package", "pushgate-tests", "--test", "metrics", "--", "--ignored"];
    let tests = [&tests[..], &["--skip", "role", "--test-threads=1"]].concat();
    bench.cargo_with(&tests, &[("_PUSHGATE_TEST_PROMETHEUS", folder)])
}

/// The folder that has the programs prometheus and promtool, or why there is none.
fn prometheus(bench: &Bench) -> Result<PathBuf, String> {
    let installed = system::find_program("prometheus").filter(|_| system::find_program("promtool").is_some());
    if let Some(folder) = installed.as_deref().and_then(Path::parent) {
        return Ok(folder.into());
    }
    let part = bench.paths.target.join("prometheus");
    let folder = part.join("tree/usr/bin");
    if ["prometheus", "promtool"].iter().all(|name| folder.join(name).is_file()) {
        return Ok(folder);
    }
    let fetch = || -> Result<()> {
        // What a run before has left half done.
        let _ = std::fs::remove_dir_all(&part);
        std::fs::create_dir_all(&part)?;
        vm::kernel::download(&part, &["prometheus".into()], bench.guard)
    };
    match fetch() {
        Ok(()) if folder.join("promtool").is_file() => Ok(folder),
        Ok(()) => Err("Debian's package prometheus has no promtool".into()),
        Err(e) => Err(format!(
            "needs prometheus and promtool, and apt-get can't fetch Debian's package prometheus: {e:#}"
        )),
    }
}

fn loom(bench: &mut Bench) -> Result<Outcome> {
    let mut command = bench.command();
    // Other flags make other artifacts; a target folder of their own keeps both sets.
    command
        .env("RUSTFLAGS", "--cfg loom")
        .arg("test")
        .arg("--target-dir")
        .arg(bench.paths.target.join("loom"));
    // Without optimisation the search takes a second more, and the build half a minute less.
    for package in ["pushgate-link", "pushgate-engine", "pushgate-gpu-kernels"] {
        command.args(["--package", package]);
    }
    command.args(["--lib", "loom_tests"]);
    let output = process::capture(command, true, bench.guard)?;
    ensure!(!output.contains("running 0 tests"), "one of the packages has no module named loom_tests");
    Ok(Outcome::Passed)
}

/// Minutes that the step `sim` simulates on all cores. Counted as CPU time, because other steps run beside it.
const SIM_MINUTES: usize = 2;

fn simulate(bench: &mut Bench) -> Result<Outcome> {
    let program = sim::build(&bench.paths, bench.guard)?;
    let mut command = process::command(program, &bench.paths.root);
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    command.args(["--cpu-minutes", &(SIM_MINUTES * cores).to_string()]);
    process::run(command, bench.guard)?;
    bench.cargo(&[sim::TESTS, &["--release"]].concat())
}

/// Runs the parsers' tests one by one, each for a second or for 20.
fn fuzz(bench: &mut Bench) -> Result<Outcome> {
    // The whole workspace, so that the step has the build of the step tests.
    let all = ["test", "--workspace", "--lib", "--bins", "--test", "fuzz", "--no-fail-fast"];
    // Those that need simulated devices are in the simulator's build.
    for tests in [&all[..], sim::TESTS] {
        let mut command = bench.command();
        command.args(tests).args(["--release", "--", "--ignored", "p8_fuzz_"]);
        command.args(["--test-threads", "1", "--nocapture"]);
        command.env("_PUSHGATE_TEST_FUZZ_SECONDS", if bench.full { "20" } else { "1" });
        // The driver bounds the address space, in which each thread's arena would take 64 MiB.
        command.env("MALLOC_ARENA_MAX", "2");
        let output = process::capture(command, true, bench.guard)?;
        ensure!(output.contains("p8_fuzz_"), "no test is named p8_fuzz_");
    }
    Ok(Outcome::Passed)
}

fn tsan(bench: &mut Bench) -> Result<Outcome> {
    ensure!(bench.paths.root.join("tests/tests/tsan.rs").exists(), "tests/tests/tsan.rs is not there");
    bench.cargo(&["test", "--release", "--package", "pushgate-tests", "--test", "tsan"])
}

/// Runs the plugin and its engine under valgrind: no byte that they touch may be invalid, unset or
/// leaked. Threads take turns under valgrind, so little is sent.
fn memcheck(bench: &mut Bench) -> Result<Outcome> {
    let plugin = plugin::build(&bench.paths, None, bench.guard)?;
    let build = ["build", "--package=pushgate-tests", "--bin=nccl-caller"];
    let programs = programs::build(&bench.paths, &build, &[], bench.guard)?;
    let caller = programs.iter().find(|p| p.name == "nccl-caller").context("nccl-caller was not built")?;
    for scenario in [
        "traffic --groups 40 --max 300000",
        "traffic --groups 40 --max 300000 --unregistered --version 8",
        "rules",
        "truncation --max 300000",
        "garbage",
        "many --times 20",
        "reload --groups 10 --max 20000",
        "killed",
    ] {
        let mut valgrind = process::command("valgrind", &bench.paths.root);
        valgrind.arg("--suppressions=tests/nccl.supp");
        valgrind.args([
            "--quiet",
            "--error-exitcode=9",
            "--leak-check=full",
            "--errors-for-leak-kinds=definite",
        ]);
        valgrind
            .arg("--fair-sched=yes")
            .arg(&caller.path)
            .args(scenario.split(' '))
            .arg("--plugin")
            .arg(&plugin);
        valgrind.env("PUSHGATE_NET_WINDOW_SIZE", "128K");
        process::run(valgrind, bench.guard)?;
    }
    Ok(Outcome::Passed)
}

fn allreduce(bench: &mut Bench, ranks: u32, more: &[&str]) -> Result<Outcome> {
    let mut command = bench.command();
    command.args(["run", "--release", "--package", "pushgate-cli", "--", "bench", "allreduce"]);
    command.args(["--ranks", &ranks.to_string(), "--size", "1M,16M", "--device", "cpu", "--iters", "1"]);
    command.arg("--json").args(more);
    let output = process::capture(command, true, bench.guard)?;
    check_result(output.lines().last().unwrap_or_default())?;
    Ok(Outcome::Passed)
}

/// Some 250 faults over each. The command itself checks the messages; here its faults are counted. Both mostly wait for the
/// next fault, so they run at once.
fn chaos(bench: &mut Bench) -> Result<Outcome> {
    let bench = &*bench;
    passed(both(|| chaos_over(bench, "tcp"), || chaos_over(bench, "local")).map(|_| ()))
}

fn chaos_over(bench: &Bench, qp: &str) -> Result<()> {
    let mut command = bench.command();
    command.args(["run", "--release", "--package", "pushgate-cli", "--", "chaos"]);
    // The timeout guards against a hang.
    command.args(["--seconds", "60", "--every", "200ms", "--device", "cpu", "--qp", qp]);
    command.args(["--timeout", "5min", "--json"]);
    let output = process::capture(command, true, bench.guard)?;
    check_chaos(output.lines().last().unwrap_or_default())
}

/// Checks the last line of `pushgate chaos`: faults were made, and some of them were recovered from.
fn check_chaos(line: &str) -> Result<()> {
    let said: serde_json::Value =
        serde_json::from_str(line).with_context(|| format!("the last line is no JSON object: {line:?}"))?;
    for key in ["messages", "faults", "recovered"] {
        ensure!(said[key].as_u64() > Some(0), "pushgate chaos says {key} = {}, not more than 0", said[key]);
    }
    for key in ["lost", "doubled", "wrong"] {
        ensure!(said[key] == 0, "pushgate chaos says {key} = {}, not 0", said[key]);
    }
    Ok(())
}

/// Checks the last line of an allreduce: the sums are right, and no message was lost.
pub fn check_result(line: &str) -> Result<()> {
    let result: serde_json::Value =
        serde_json::from_str(line).with_context(|| format!("the last line is no JSON object: {line:?}"))?;
    let right: [(&str, serde_json::Value); 3] =
        [("verified", true.into()), ("dropped", 0.into()), ("rnr", 0.into())];
    for (key, wanted) in right {
        match result.get(key) {
            Some(value) if *value == wanted => (),
            Some(value) => bail!("the allreduce says {key} = {value}, not {wanted}"),
            None => bail!("the allreduce says nothing of {key}: {line}"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budgets_fit_into_30_minutes_and_quick_ones_into_5() {
        let budget = |quick, lanes: &[Lane]| {
            let steps = STEPS.iter().filter(move |step| step.when.is_in(quick, false));
            steps.filter(|step| lanes.contains(&step.lane)).map(|step| step.budget).sum::<u64>()
        };
        let (one_by_one, beside) =
            (budget(false, &[Lane::First, Lane::Main]), budget(false, &[Lane::Beside]));
        assert!(one_by_one < 30 * 60 && beside < one_by_one, "{one_by_one} s, and {beside} s beside");
        assert!(budget(true, &[Lane::First, Lane::Main, Lane::Beside]) < 5 * 60);
    }

    #[test]
    fn the_counts_of_a_run_with_faults_are_checked() {
        let good = r#"{"messages": 9, "faults": 3, "recovered": 2, "lost": 0, "doubled": 0, "wrong": 0}"#;
        check_chaos(good).unwrap();
        for (from, to) in
            [("9", "0"), ("3", "0"), ("2", "0"), ("\"lost\": 0", "\"lost\": 1"), ("wrong", "right")]
        {
            check_chaos(&good.replace(from, to)).unwrap_err();
        }
    }

    #[test]
    fn the_result_of_an_allreduce_is_checked() {
        check_result(r#"{"verified": true, "dropped": 0, "rnr": 0, "gbps": 1.5}"#).unwrap();
        for bad in [
            "",
            "[]",
            r#"{"verified": true, "dropped": 0}"#,
            r#"{"verified": false, "dropped": 0, "rnr": 0}"#,
            r#"{"verified": true, "dropped": 1, "rnr": 0}"#,
        ] {
            check_result(bad).unwrap_err();
        }
    }
}
