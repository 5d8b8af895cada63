//! The library as it is installed: what leaves it, and programs in C that are built against it with nothing but pkg-config or
//! CMake.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use pushgate_tests::built::{forget_package, pushgate, root};
use pushgate_tests::skip;

/// A folder of this test for `name`, empty.
fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("c-api-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The prefix into which `cargo xtask install` has put everything, once for all tests.
fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = scratch("prefix");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root()).args(["run", "--quiet", "--package", "xtask", "--", "install", "--prefix"]);
        cargo.arg(&prefix);
        forget_package(&mut cargo);
        run(&mut cargo);
        prefix
    })
}

/// Runs a command that must succeed.
fn run(command: &mut Command) -> String {
    let output = output(command);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"))
}

/// Whether the program is there. Says that a test is skipped if not.
fn have(program: &str) -> bool {
    let is_there = Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if !is_there {
        skip(&format!("no {program}: install it to test the installed C library"));
    }
    is_there
}

/// What pkg-config says of the library.
fn pkg_config(what: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.args(what).arg("pushgate").env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig"));
    run(&mut command).split_whitespace().map(String::from).collect()
}

/// A program that runs with the installed library, its kernels on the CPU.
fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    command.env("LD_LIBRARY_PATH", prefix().join("lib")).env("PUSHGATE_DEVICE", "cpu");
    command
}

fn header() -> String {
    fs::read_to_string(prefix().join("include/pushgate/pushgate.h")).unwrap()
}

/// The calls that the header declares.
fn declared() -> BTreeSet<String> {
    let header = header();
    let (_, functions) = header.split_once("extern \"C\" {").unwrap();
    let code = functions.split("*/").map(|part| part.split("/**").next().unwrap());
    let names = code.filter_map(|code| code.split_once('(')?.0.rsplit([' ', '*']).next());
    names.filter(|name| name.starts_with("pushgate_")).map(String::from).collect()
}

#[test]
fn the_calls_of_the_header_leave_the_library_and_nothing_else() {
    if !have("nm") || !have("readelf") {
        return;
    }
    let library = prefix().join("lib/libpushgate.so");
    let symbols = run(Command::new("nm").args(["-D", "--defined-only"]).arg(&library));
    let mut names: BTreeSet<String> =
        symbols.lines().map(|line| line.rsplit(' ').next().unwrap().to_string()).collect();
    assert!(names.remove("PUSHGATE_0.2"), "{symbols}");
    let wanted: BTreeSet<_> = declared().iter().map(|name| format!("{name}@@PUSHGATE_0.2")).collect();
    let differ: Vec<_> = names.symmetric_difference(&wanted).collect();
    assert!(differ.is_empty() && names.len() >= 60, "{} calls, {differ:?}", names.len());
    let dynamic = run(Command::new("readelf").arg("-d").arg(&library));
    assert!(dynamic.contains("[libpushgate.so.0.2]"), "{dynamic}");
    assert!(header().contains("#define PUSHGATE_INTERFACE 2\n"));
}

#[test]
fn the_header_compiles_as_every_standard_that_it_names() {
    let folder = scratch("header");
    // Beside the device's structures, whose names must be others.
    let text = "#include <pushgate/pushgate.h>\n#include <pushgate/abi.h>\nint main(void) { return pushgate_interface() != 2; }\n";
    for (compiler, standard, file) in
        [("cc", "c99", "a.c"), ("cc", "c11", "b.c"), ("g++", "c++17", "c.cc"), ("g++", "c++20", "d.cc")]
    {
        let source = folder.join(file);
        fs::write(&source, text).unwrap();
        let mut compile = Command::new(compiler);
        compile.arg(format!("-std={standard}")).args(["-Wall", "-Wextra", "-Wpedantic", "-Werror"]);
        // Not -isystem, which would silence them.
        compile.arg("-I").arg(prefix().join("include")).arg(&source).arg("-o").arg(folder.join(standard));
        compile.arg("-L").arg(prefix().join("lib")).arg("-lpushgate");
        run(&mut compile);
        run(&mut program(&folder.join(standard)));
    }
}

/// Builds a program of this folder with `flags`.
fn built(source: &str, name: &str, flags: &[&str]) -> PathBuf {
    let program = scratch(name).join(source.trim_end_matches(".c"));
    let mut compile = Command::new("cc");
    compile.args(["-std=c99", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]).args(flags);
    compile.arg(root().join("c-api/tests").join(source)).args(pkg_config(&["--cflags", "--libs"]));
    run(compile.arg("-lpthread").arg("-o").arg(&program));
    program
}

/// Builds the program of wrong calls with `flags`.
fn misuse(name: &str, flags: &[&str]) -> PathBuf {
    built("misuse.c", name, flags)
}

#[test]
fn p7_closes_and_calls_to_a_proxy_end_when_the_program_interrupts_them() {
    if !have("pkg-config") {
        return;
    }
    let interrupt = built("interrupt.c", "interrupt", &[]);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let folder = scratch("interrupt-proxy");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
    let mut program = program(&interrupt);
    program.arg(pushgate()).arg(format!("127.0.0.1:{port}")).arg(folder.join("socket"));
    let ended = pushgate_tests::output(&mut program, pushgate_tests::hang());
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{said}");
}

/// How many wrong calls the program's last line counts.
fn counted(said: &str) -> u32 {
    let line = said.lines().last().unwrap_or_default();
    assert!(line.ends_with("wrong calls were refused, 0 otherwise than they should be"), "{said}");
    line.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn p8_wrong_calls_are_refused_under_the_address_sanitizer() {
    if !have("pkg-config") {
        return;
    }
    let flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    let mut program = program(&misuse("asan", &flags));
    // Sizes that no memory has are among the wrong arguments.
    let options = "detect_stack_use_after_return=1:allocator_may_return_null=1";
    let said = run(program.env("ASAN_OPTIONS", options));
    assert!(counted(&said) >= 300, "{said}");
}

#[test]
fn p8_wrong_calls_are_refused_under_valgrind() {
    if !have("pkg-config") || !have("valgrind") {
        return;
    }
    let misuse = misuse("valgrind", &["-O1"]);
    let mut valgrind = program(Path::new("valgrind"));
    valgrind.args(["--quiet", "--error-exitcode=9", "--fair-sched=yes"]);
    valgrind.args(["--leak-check=full", "--errors-for-leak-kinds=definite"]);
    assert!(counted(&run(valgrind.arg(misuse))) >= 300);
}

#[test]
fn every_call_of_the_header_is_in_the_program_of_wrong_calls() {
    let text = fs::read_to_string(root().join("c-api/tests/misuse.c")).unwrap();
    let missing: Vec<_> = declared().into_iter().filter(|name| !text.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Runs the example, and checks what both ranks say.
fn check_example(put: &Path) {
    let said = run(program(put).arg(root().join("examples/c/put.cu")));
    let mut lines: Vec<_> = said.lines().collect();
    lines.sort();
    let right = |rank: u32, peer: u32| format!("rank {rank}: all 65536 bytes of rank {peer} are right");
    assert_eq!(lines, [right(0, 1), right(1, 0)]);
}

#[test]
fn the_example_is_built_by_pkg_config_alone_and_its_processes_put_to_each_other() {
    if !have("pkg-config") {
        return;
    }
    let put = scratch("example").join("put");
    let mut compile = Command::new("cc");
    compile
        .args(["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
        .arg(root().join("examples/c/put.c"));
    run(compile.args(pkg_config(&["--cflags", "--libs"])).arg("-o").arg(&put));
    check_example(&put);
    // Its errors are sentences, and its exit status says that it failed.
    let failed = output(program(&put).arg("/nowhere/put.cu"));
    let said = String::from_utf8_lossy(&failed.stderr);
    assert!(failed.status.code() == Some(1) && said.contains("/nowhere/put.cu"), "{said}");
    assert_eq!(pkg_config(&["--modversion"]), [env!("CARGO_PKG_VERSION")]);
}

#[test]
fn the_example_is_built_by_cmake() {
    if !have("cmake") {
        return;
    }
    let build = scratch("cmake");
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(root().join("examples/c")).arg("-B").arg(&build);
    run(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix().display())));
    run(Command::new("cmake").arg("--build").arg(&build));
    check_example(&build.join("put"));
    // A release of another interface is not taken.
    let newer = scratch("cmake-newer");
    fs::write(
        newer.join("CMakeLists.txt"),
        "cmake_minimum_required(VERSION 3.18)\nproject(x C)\nfind_package(pushgate 9.1 REQUIRED)\n",
    )
    .unwrap();
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(&newer).arg("-B").arg(newer.join("build"));
    let refused = output(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix().display())));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("requested version \"9.1\""), "{said}");
}

/// A script that starts an example's ranks, with the command `pushgate` in the path.
fn run_script(script: &str) -> Command {
    let mut command = program(&root().join("examples").join(script));
    let mut places = vec![pushgate().parent().unwrap().to_path_buf()];
    places.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    command.env("PATH", std::env::join_paths(places).unwrap());
    command
}

/// Builds an example in C by pkg-config.
fn built_by_pkg_config(compiler: &str, source: &str) -> PathBuf {
    let name = Path::new(source).file_stem().unwrap();
    let to = scratch(&format!("example-{}", name.display())).join(name);
    let mut compile = Command::new(compiler);
    compile.args(["-std=c99", "-Wall", "-Wextra", "-Werror"]).arg(root().join("examples").join(source));
    run(compile.args(pkg_config(&["--cflags", "--libs"])).arg("-o").arg(&to));
    to
}

/// The lines without the numbers of ranks that a launcher puts before them, sorted.
fn lines(said: &str) -> Vec<&str> {
    let mut lines: Vec<_> =
        said.lines().map(|line| line.trim_start_matches(|c| "[0123456789] ".contains(c))).collect();
    lines.sort();
    lines
}

#[test]
fn the_cuda_example_is_built_by_cmake_for_the_cpu_and_its_processes_push_to_each_other() {
    if !have("cmake") {
        return;
    }
    let build = scratch("cmake-cuda");
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(root().join("examples/cuda")).arg("-B").arg(&build).arg("-DPUSHGATE_CPU=ON");
    run(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix().display())));
    run(Command::new("cmake").arg("--build").arg(&build));
    let said = run(run_script("cuda/run.sh").arg(build.join("push")));
    let right = |rank: u32, peer: u32| format!("rank {rank}: all 262144 words of rank {peer} are right");
    assert_eq!(lines(&said), [right(0, 1), right(1, 0)]);
}

#[test]
fn the_halo_exchange_is_right_by_push_and_by_memcpy_for_two_and_three_ranks() {
    if !have("pkg-config") {
        return;
    }
    let halo = built_by_pkg_config("cc", "halo/halo.c");
    for ranks in ["2", "3"] {
        let said = run(run_script("halo/run.sh").arg(&halo).arg(ranks));
        let lines = lines(&said);
        assert_eq!(lines.len(), 2, "{said}");
        for (line, way) in lines.iter().zip(["memcpy ", "push "]) {
            assert!(line.starts_with(way) && line.contains("right after 20 steps"), "{said}");
        }
    }
}

#[test]
fn the_mpi_example_meets_by_an_id_that_mpi_hands_on() {
    if !have("pkg-config") || !have("mpicc") || !have("mpirun") {
        return;
    }
    let ring = built_by_pkg_config("mpicc", "mpi/ring.c");
    for ranks in [2, 3] {
        let mut script = run_script("mpi/run.sh");
        script.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        let said = run(script.arg(&ring).arg(ranks.to_string()).arg("--oversubscribe"));
        let right =
            |rank| format!("rank {rank}: all 65536 bytes of rank {} are right", (rank + ranks - 1) % ranks);
        let mut said: Vec<_> = said.lines().collect();
        said.sort();
        assert_eq!(said, (0..ranks).map(right).collect::<Vec<_>>());
    }
}

#[test]
fn every_call_has_a_manual_page_without_a_warning() {
    let pages = prefix().join("share/man/man3");
    for name in declared() {
        let page = pages.join(format!("{name}.3"));
        assert!(page.is_file(), "{}", page.display());
    }
    if !have("man") {
        return;
    }
    for name in declared() {
        let mut man = Command::new("man");
        man.args(["--warnings", "-l"])
            .arg(pages.join(format!("{name}.3")))
            .env("MANWIDTH", "100")
            .env("LC_ALL", "C.UTF-8");
        let shown = output(&mut man);
        let (text, warnings) =
            (String::from_utf8_lossy(&shown.stdout), String::from_utf8_lossy(&shown.stderr));
        assert!(shown.status.success() && warnings.is_empty(), "{name}: {warnings}");
        assert!(text.contains(&name) && text.contains("DESCRIPTION"), "{text}");
    }
}
