//! What the crate asks NVML and makes of the answers, with a stub library: three GPUs, the last one
//! lost; NVLinks to a switch, to each other and, of one, to the processor; MIG and a client of the multi-process service on
//! one.

mod common;

use std::ffi::OsStr;
use std::process::Command;

use common::{Folder, at};
use pushgate_topology::nvml::{self, Busy};
use pushgate_topology::{Mig, NvLink, NvLinkEnd, Peer};

const LIBRARY: &str = r#"
#include <string.h>
#include <stdint.h>
#include <unistd.h>
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char id_text[32]; };
struct value { unsigned field, scope; long long at, took; int type, error; union { unsigned count; long long all; } is; };
struct process { unsigned pid; unsigned long long bytes; unsigned gpu, compute; };
static long n(void *d) { return (long)(intptr_t)d; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned l) { strcpy(s, "580.65.06"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *c) { *c = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(intptr_t)(i + 1); return i == 2 ? 15 : 0; }
int nvmlDeviceGetPciInfo_v3(void *d, struct pci *p) { strcpy(p->id_text, n(d) == 1 ? "00000000:18:00.0" : "00000000:1A:00.0"); return 0; }
int nvmlDeviceGetName(void *d, char *s, unsigned l) { strcpy(s, n(d) > 2 ? "NVIDIA H200 MIG 3g.71gb" : "NVIDIA H200"); return 0; }
int nvmlDeviceGetUUID(void *d, char *s, unsigned l) { strcpy(s, n(d) == 1 ? "GPU-1" : "GPU-\0332"); return 0; }
int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *later) { *now = *later = n(d) == 2; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *d, unsigned *c) { *c = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *d, unsigned i, void **m) { *m = (void *)(intptr_t)(10 + i); return i == 0 || i == 4 ? 0 : 6; }
int nvmlDeviceGetNvLinkState(void *d, unsigned l, int *up) { *up = l != 1; return l > 4 ? 2 : 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned l, struct pci *p) {
	strcpy(p->id_text, l == 4 ? "fffffff:ffff:ff" : l > 1 ? "00000000:05:00.0" : n(d) == 1 ? "00000000:1A:00.0" : "00000000:18:00.0");
	return 0;
}
int nvmlDeviceGetFieldValues(void *d, int n_, struct value *v) {
	v->error = n(d) == 1 && v->field == 170 ? 0 : 3; v->type = 1; v->is.count = 10;
	return 0;
}
int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status) { *status = n(a) == 2 && what == 1 ? 4 : 0; return 0; }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *d, unsigned *c, struct process *p) {
	if (n(d) != 2) { *c = 0; return 0; }
	if (!p || *c < 1) { *c = 1; return 7; }
	*c = 1; memset(p, 0, sizeof *p); p->pid = 9; return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *at, void **d) {
	*d = (void *)(intptr_t)(strstr(at, "18:00") ? 1 : strstr(at, "1a:00") ? 2 : 0);
	return *d ? 0 : 6;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *c, struct process *p) {
	if (n(d) != 2) { *c = 0; return 0; }
	if (!p || *c < 2) { *c = 2; return 7; }
	*c = 2; memset(p, 0, 2 * sizeof *p); p[0].pid = 77; p[1].pid = getpid(); return 0;
}
int nvmlDeviceGetUtilizationRates(void *d, unsigned *rates) { rates[0] = 40; rates[1] = 1; return n(d) == 2 ? 0 : 3; }
"#;

fn library(folder: &Folder, source: &str) -> std::path::PathBuf {
    let (c, so) = (folder.path().join("ml.c"), folder.path().join("libnvidia-ml.so.1"));
    std::fs::write(&c, source).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(&so).arg(&c).status();
    assert!(built.expect("cc runs: install gcc").success());
    so
}

#[test]
fn answers_become_gpus() {
    let folder = Folder::new();
    let told = nvml::read_from(library(&folder, LIBRARY).as_os_str()).unwrap();
    let (a, b) = (at("0000:18:00.0"), at("0000:1a:00.0"));
    let [first, second] = &told.gpus[..] else { panic!("{told:?}") };
    assert_eq!((first.address, first.index, first.name.as_deref()), (a, Some(0), Some("NVIDIA H200")));
    assert_eq!((first.uuid.as_deref(), second.uuid.as_deref()), (Some("GPU-1"), Some("GPU-2")));
    assert_eq!(first.mig, None);
    assert_eq!(second.mig, Some(Mig { instances: vec!["NVIDIA H200 MIG 3g.71gb".into(); 2] }));
    assert_eq!(second.mps, Some(true));
    let links = |other| {
        vec![NvLink { to: NvLinkEnd::Gpu(other), links: 1 }, NvLink { to: NvLinkEnd::Switch, links: 3 }]
    };
    let c2c = NvLink { to: NvLinkEnd::Cpu, links: 10 };
    assert_eq!((&first.nvlinks, &second.nvlinks), (&[links(b), vec![c2c]].concat(), &links(a)));
    assert_eq!(first.peers, [Peer { to: b, access: true }]);
    // The GPU may read but not write.
    assert_eq!(second.peers, [Peer { to: a, access: false }]);
    assert_eq!(told.notes.len(), 1);
    assert!(
        told.notes[0].starts_with("NVML, GPU 2: ") && told.notes[0].ends_with("nvidia-smi says more"),
        "{told:?}"
    );
}

#[test]
fn others_at_work_are_seen() {
    let folder = Folder::new();
    let library = library(&folder, LIBRARY);
    let busy = |at| nvml::busy_by(library.as_os_str(), at);
    assert_eq!(busy("0000:18:00.0"), Ok(Busy { processes: vec![], utilization: None }));
    assert_eq!(busy("0000:1a:00.0"), Ok(Busy { processes: vec![77], utilization: Some(40) }));
    let e = busy("0000:99:00.0").unwrap_err();
    assert!(e.starts_with("NVML, GPU at 0000:99:00.0: "), "{e}");
    let e = nvml::busy_by(OsStr::new("/nonexistent/libnvidia-ml.so.1"), "0000:18:00.0").unwrap_err();
    assert!(e.starts_with("/nonexistent/libnvidia-ml.so.1: "), "{e}");
}

#[test]
fn a_library_that_is_not_there_or_none_is_an_error_with_its_name() {
    let e = nvml::read_from(OsStr::new("/nonexistent/libnvidia-ml.so.1")).unwrap_err();
    assert!(
        e.starts_with("/nonexistent/libnvidia-ml.so.1: ") && e.contains("cannot open shared object"),
        "{e}"
    );
    let folder = Folder::new();
    let e = nvml::read_from(library(&folder, "int nothing;").as_os_str()).unwrap_err();
    assert!(e.contains("libnvidia-ml.so.1: ") && e.contains("nvmlInit"), "{e}");
}
