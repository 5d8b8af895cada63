/* C's side of tests/inlines.rs: a function around each of the real inlines, and stand-ins for the
 * exported functions that some inlines call, so that libibverbs itself is not needed. */

#include <errno.h>
#include <infiniband/verbs.h>

typedef void note_fn(const char *name, const uint64_t *arguments, size_t count);

static note_fn *note;
static int result;

void c_set(note_fn *to, int next_result)
{
	note = to;
	result = next_result;
}

#define NOTE(name, ...)                                                        \
	do {                                                                   \
		const uint64_t arguments[] = { __VA_ARGS__ };                  \
		note(name, arguments, sizeof(arguments) / sizeof(*arguments)); \
	} while (0)
#define P(pointer) ((uintptr_t)(pointer))

const uint64_t c_port_attr_size = sizeof(struct ibv_port_attr);
const uint64_t c_device_attr_size = sizeof(struct ibv_device_attr_ex);

int c_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	return ibv_post_send(qp, wr, bad_wr);
}

int c_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	return ibv_post_recv(qp, wr, bad_wr);
}

int c_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
	return ibv_poll_cq(cq, num_entries, wc);
}

int c_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	return ibv_req_notify_cq(cq, solicited_only);
}

int c_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr)
{
	return ibv_query_port(context, port_num, attr);
}

int c_query_gid_ex(struct ibv_context *context, uint32_t port_num, uint32_t gid_index,
		   struct ibv_gid_entry *entry, uint32_t flags)
{
	return ibv_query_gid_ex(context, port_num, gid_index, entry, flags);
}

int c_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
		      struct ibv_device_attr_ex *attr)
{
	return ibv_query_device_ex(context, input, attr);
}

/* The macro checks whether the flags are a constant. */
struct ibv_mr *c_reg_mr_plain(struct ibv_pd *pd, void *addr, size_t length)
{
	return ibv_reg_mr(pd, addr, length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
}

struct ibv_mr *c_reg_mr_relaxed(struct ibv_pd *pd, void *addr, size_t length)
{
	return ibv_reg_mr(pd, addr, length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING);
}

struct ibv_dm *c_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr)
{
	return ibv_alloc_dm(context, attr);
}

int c_free_dm(struct ibv_dm *dm)
{
	return ibv_free_dm(dm);
}

int c_memcpy_to_dm(struct ibv_dm *dm, uint64_t dm_offset, const void *host_addr, size_t length)
{
	return ibv_memcpy_to_dm(dm, dm_offset, host_addr, length);
}

int c_memcpy_from_dm(void *host_addr, struct ibv_dm *dm, uint64_t dm_offset, size_t length)
{
	return ibv_memcpy_from_dm(host_addr, dm, dm_offset, length);
}

struct ibv_mr *c_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t dm_offset, size_t length,
			   unsigned int access)
{
	return ibv_reg_dm_mr(pd, dm, dm_offset, length, access);
}

#undef ibv_query_port
#undef ibv_reg_mr

#define A_REGION ((struct ibv_mr *)0x7000)

/* Like the real function, this one does not write everything that the header's type has. */
int ibv_query_port(struct ibv_context *context, uint8_t port_num, struct _compat_ibv_port_attr *attr)
{
	NOTE("ibv_query_port", P(context), port_num, P(attr));
	((struct ibv_port_attr *)attr)->lid = 0x1234;
	return result;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	NOTE("ibv_query_device", P(context), P(attr));
	attr->max_qp = 77;
	return result;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	NOTE("ibv_reg_mr", P(pd), P(addr), length, (uint64_t)access);
	return A_REGION;
}

#ifndef OLD_LIBRARY
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
				unsigned int access)
{
	NOTE("ibv_reg_mr_iova2", P(pd), P(addr), length, iova, access);
	return A_REGION;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
				 int fd, int access)
{
	NOTE("ibv_reg_dmabuf_mr", P(pd), offset, length, iova, (uint64_t)fd, (uint64_t)access);
	return A_REGION;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port_num, uint32_t gid_index,
		      struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size)
{
	NOTE("_ibv_query_gid_ex", P(context), port_num, gid_index, P(entry), flags, entry_size);
	entry->gid_type = 2;
	return result;
}
#endif
