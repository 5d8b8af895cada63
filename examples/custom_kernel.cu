// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A kernel of your own over the device API: each rank greets the other.
#include "pushgate/device.cuh"

using namespace pushgate;

// What the host passes, field by field the same as `Params` in custom_kernel.rs.
struct greet_params {
	u64 qp;      // one pushgate_qp in device memory
	u64 region;  // u64: this rank's region, which the other rank puts into
	u64 arrived; // u64[3]: status, what was put here, what was sent here
	u64 greeting;
	u32 rkey; // the other rank's region
	u32 pad;
};

// Every thread of the launch runs this. One is enough here; a warp or a block
// would call the same functions as put_signal<warp>(...), all threads together.
PUSHGATE_KERNEL(greet, greet_params)
{
	queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
	u64 *arrived = reinterpret_cast<u64 *>(p.arrived);
	message m;

	// One-sided: into the other's region, and when it is there, its signal 0 is 1.
	status s = put_signal(qp, p.rkey, 0, &p.greeting, sizeof p.greeting, 0, 1);
	// Two-sided: takes one of the other's receives.
	if (s == status::ok)
		s = send(qp, &p.greeting, sizeof p.greeting, /* tag */ 7);

	// What the other put is complete once its signal is here.
	if (s == status::ok)
		s = wait_signal(qp, 0, 1);
	if (s == status::ok)
		arrived[1] = load<order::relaxed>(reinterpret_cast<const u64 *>(p.region));

	// A message is read where it lies, then its place is given back.
	if (s == status::ok)
		s = recv(qp, m);
	if (s == status::ok) {
		copy_out(&arrived[2], m);
		release(qp);
	}
	arrived[0] = (u64)s; // every wait ends, with `ok` or with a cause
	qp.close();	     // keeps the receive cursor for the next kernel
}
