// NIXL's class over the C face: turns its lists and strings into what face.h takes, and decides nothing. No exception leaves it.

#include "face.h"
#include "nixl.h"

#include <exception>
#include <memory>

namespace {

/* The version of the plugin interface that nixl.h lays out. */
constexpr int API_VERSION = 1;

pushgate_nixl_bytes bytes(const std::string &text) { return {text.data(), text.size()}; }

void take_into(void *to, pushgate_nixl_bytes taken) { static_cast<std::string *>(to)->append(taken.at, taken.length); }

/* Runs a call that may run out of memory. */
template <class Call> nixl_status_t guarded(Call call) noexcept {
    try {
        return static_cast<nixl_status_t>(call());
    } catch (const std::exception &) {
        return NIXL_ERR_BACKEND;
    }
}

/* A registration: one of this agent, the view of one for transfers within the agent, or one of another agent. */
class Metadata : public nixlBackendMD {
  public:
    enum Kind { OWN, VIEW, REMOTE };
    Metadata(Kind kind, uint64_t registration) : nixlBackendMD(kind == OWN), kind(kind), registration(registration) {}
    const Kind kind;
    const uint64_t registration;
};

class Request : public nixlBackendReqH {
  public:
    explicit Request(pushgate_nixl_transfer *transfer) : transfer(transfer) {}
    pushgate_nixl_transfer *const transfer;
};

std::vector<pushgate_nixl_element> elements(const nixl_meta_dlist_t &list) {
    std::vector<pushgate_nixl_element> all;
    all.reserve(list.all().size());
    for (const nixlMetaDesc &desc : list.all()) {
        const auto *metadata = static_cast<const Metadata *>(desc.metadataP);
        all.push_back({desc.addr, desc.len, desc.devId, metadata ? metadata->registration : 0});
    }
    return all;
}

class Engine : public nixlBackendEngine {
  public:
    explicit Engine(const nixlBackendInitParams *init) : nixlBackendEngine(init) {
        std::vector<pushgate_nixl_parameter> parameters;
        for (const auto &[key, value] : *init->customParams)
            parameters.push_back({bytes(key), bytes(value)});
        agent = pushgate_nixl_open(bytes(init->localAgent), parameters.data(), parameters.size());
        initErr = agent == nullptr;
    }
    ~Engine() override {
        if (agent)
            pushgate_nixl_close(agent);
    }

    bool supportsRemote() const override { return true; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return true; }
    nixl_mem_list_t getSupportedMems() const override { return memories(); }

    static nixl_mem_list_t memories() {
        nixl_mem_list_t all;
        for (int kind = DRAM_SEG; kind <= FILE_SEG; kind++)
            if (pushgate_nixl_memories() >> kind & 1)
                all.push_back(static_cast<nixl_mem_t>(kind));
        return all;
    }

    nixl_status_t registerMem(const nixlBlobDesc &mem, const nixl_mem_t &kind, nixlBackendMD *&out) override {
        return guarded([&] {
            uint64_t registration = 0;
            int status = pushgate_nixl_register(agent, mem.addr, mem.len, mem.devId, kind, &registration);
            if (status == NIXL_SUCCESS)
                out = new Metadata(Metadata::OWN, registration);
            return status;
        });
    }
    nixl_status_t deregisterMem(nixlBackendMD *meta) override {
        const auto *own = static_cast<Metadata *>(meta);
        int status = pushgate_nixl_deregister(agent, own->registration);
        if (status == NIXL_SUCCESS)
            delete own;
        return static_cast<nixl_status_t>(status);
    }
    nixl_status_t connect(const std::string &peer) override {
        return static_cast<nixl_status_t>(pushgate_nixl_connect(agent, bytes(peer)));
    }
    nixl_status_t disconnect(const std::string &peer) override {
        return static_cast<nixl_status_t>(pushgate_nixl_disconnect(agent, bytes(peer)));
    }
    nixl_status_t unloadMD(nixlBackendMD *input) override {
        std::unique_ptr<Metadata> metadata(static_cast<Metadata *>(input));
        if (metadata->kind == Metadata::OWN) {
            metadata.release();
            return NIXL_SUCCESS;
        }
        if (metadata->kind == Metadata::VIEW)
            return NIXL_SUCCESS;
        return static_cast<nixl_status_t>(pushgate_nixl_unload(agent, metadata->registration));
    }

    nixl_status_t prepXfer(const nixl_xfer_op_t &operation, const nixl_meta_dlist_t &local, const nixl_meta_dlist_t &remote,
                           const std::string &peer, nixlBackendReqH *&handle, const nixl_opt_b_args_t *) const override {
        return guarded([&] {
            const auto here = elements(local), there = elements(remote);
            if (here.size() != there.size())
                return static_cast<int>(NIXL_ERR_INVALID_PARAM);
            pushgate_nixl_transfer *transfer = nullptr;
            int status = pushgate_nixl_prepare(agent, operation == NIXL_WRITE, bytes(peer), local.getType(), here.data(),
                                               remote.getType(), there.data(), here.size(), &transfer);
            if (status == NIXL_SUCCESS)
                handle = new Request(transfer);
            return status;
        });
    }
    nixl_status_t postXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &, const std::string &,
                           nixlBackendReqH *&handle, const nixl_opt_b_args_t *opt_args) const override {
        const bool notifies = opt_args && opt_args->hasNotif;
        const pushgate_nixl_bytes notification = notifies ? bytes(opt_args->notifMsg) : pushgate_nixl_bytes{nullptr, 0};
        return static_cast<nixl_status_t>(pushgate_nixl_post(agent, transfer(handle), notifies ? &notification : nullptr));
    }
    nixl_status_t checkXfer(nixlBackendReqH *handle) const override {
        return static_cast<nixl_status_t>(pushgate_nixl_check(agent, transfer(handle)));
    }
    nixl_status_t releaseReqH(nixlBackendReqH *handle) const override {
        // NIXL keeps the handle of what was not released, and releases it again.
        int status = pushgate_nixl_release(agent, transfer(handle));
        if (status == NIXL_SUCCESS)
            delete handle;
        return static_cast<nixl_status_t>(status);
    }

    nixl_status_t getPublicData(const nixlBackendMD *meta, std::string &out) const override {
        return guarded([&] {
            out.clear();
            return pushgate_nixl_public(agent, static_cast<const Metadata *>(meta)->registration, &out, take_into);
        });
    }
    nixl_status_t getConnInfo(std::string &out) const override {
        return guarded([&] {
            out.clear();
            return pushgate_nixl_connection(agent, &out, take_into);
        });
    }
    nixl_status_t loadRemoteConnInfo(const std::string &peer, const std::string &connection) override {
        return static_cast<nixl_status_t>(pushgate_nixl_load_connection(agent, bytes(peer), bytes(connection)));
    }
    nixl_status_t loadRemoteMD(const nixlBlobDesc &input, const nixl_mem_t &kind, const std::string &peer,
                               nixlBackendMD *&out) override {
        return guarded([&] {
            uint64_t registration = 0;
            int status = pushgate_nixl_load(agent, bytes(peer), bytes(input.metaInfo), kind, &registration);
            if (status == NIXL_SUCCESS)
                out = new Metadata(Metadata::REMOTE, registration);
            return status;
        });
    }
    nixl_status_t loadLocalMD(nixlBackendMD *input, nixlBackendMD *&out) override {
        return guarded([&] {
            out = new Metadata(Metadata::VIEW, static_cast<Metadata *>(input)->registration);
            return static_cast<int>(NIXL_SUCCESS);
        });
    }

    nixl_status_t getNotifs(notif_list_t &list) override {
        return guarded([&] {
            const auto take = [](void *to, pushgate_nixl_bytes from, pushgate_nixl_bytes message) {
                static_cast<notif_list_t *>(to)->emplace_back(std::string(from.at, from.length),
                                                              std::string(message.at, message.length));
            };
            return pushgate_nixl_notifications(agent, &list, take);
        });
    }
    nixl_status_t genNotif(const std::string &peer, const std::string &message) const override {
        return static_cast<nixl_status_t>(pushgate_nixl_notify(agent, bytes(peer), bytes(message)));
    }

  private:
    static pushgate_nixl_transfer *transfer(nixlBackendReqH *handle) { return static_cast<Request *>(handle)->transfer; }

    pushgate_nixl_agent *agent = nullptr;
};

nixlBackendEngine *create(const nixlBackendInitParams *init) {
    try {
        return new Engine(init);
    } catch (const std::exception &) {
        return nullptr;
    }
}

nixl_b_params_t options() {
    nixl_b_params_t all;
    pushgate_nixl_parameters(&all, [](void *to, pushgate_nixl_bytes key, pushgate_nixl_bytes value) {
        static_cast<nixl_b_params_t *>(to)->emplace(std::string(key.at, key.length), std::string(value.at, value.length));
    });
    return all;
}

nixlBackendPlugin table = {
    API_VERSION,
    create,
    [](nixlBackendEngine *engine) { delete engine; },
    [] { return "PUSHGATE"; },
    pushgate_nixl_version,
    options,
    Engine::memories,
};

} // namespace

extern "C" void *pushgate_nixl_table(void) { return &table; }
