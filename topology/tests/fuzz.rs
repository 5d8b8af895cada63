//! Files that describe a machine, changed in every way: NCCL's XML and TOML.

use pushgate_tests::fuzz::{depth, fuzz, kind};
use pushgate_topology::{Evidence, Topology, draw};

const NCCL: &str = r#"<system version="1">
  <cpu host_hash="0xa1" numaid="0" arch="x86_64">
    <pci busid="0000:16:00.0" class="0x060400" vendor="0x1000" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:18:00.0" class="0x030200" vendor="0x10de" device="0x2335">
        <gpu dev="0" sm="90"><nvlink target="0000:05:00.0" count="9" tclass="0x068000"/><c2c bw="1" count="2"/></gpu>
      </pci>
      <pci busid="0000:19:00.0" class="0x020700">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic>
      </pci>
    </pci>
    <nic><net name="eth0" dev="3" speed="10000" port="0" gdr="0"/></nic>
  </cpu>
</system>
"#;

#[test]
#[ignore = "the step fuzz runs this"]
fn p8_fuzz_no_file_of_nccls_or_in_toml_makes_the_reader_panic_or_stay() {
    let toml = Topology::from_nccl(NCCL).unwrap().to_toml();
    Topology::from_toml(&toml).unwrap();
    let seeds = [NCCL, &toml].map(|text| text.as_bytes().to_vec());
    fuzz(&seeds, |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let read = match text.trim_start().starts_with('<') {
            true => Topology::from_nccl(&text),
            false => Topology::from_toml(&text),
        };
        match read {
            Ok(t) => {
                let drawn = draw::report(&t.report(Evidence::ByDistance), draw::Style::default());
                assert!(!drawn.chars().any(|c| c.is_control() && c != '\n'), "{drawn:?}");
                let notes = depth(t.notes.len());
                [t.functions.len(), t.gpus.len(), t.nics.len()]
                    .map(depth)
                    .iter()
                    .fold(notes, |all, n| all.wrapping_mul(64) + n)
            }
            // Errors in TOML quote the line in front of the last one.
            Err(e) => kind(e.to_string().lines().last().unwrap_or_default()),
        }
    });
}
